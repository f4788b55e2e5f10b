// Dense matrix products with an epilogue, on Hopper: persistent blocks, TMA, wgmma.
//
//   out = f(a b^T + bias)                       f: none, ReLU, GELU, SiLU
//   out = f(a gate^T) * (a up^T)                PARTS 2: SwiGLU, GeGLU
//
// With KEEPS the input of f is stored too, for the backward pass.
//
// Mapping: persistent blocks compute TILE_M x TILE_N tiles of the product, in rasterisation groups
//   of `raster_group` tile rows (common/tile_scheduler.cuh). A thread of the first warpgroup loads
//   both operands in k steps of 64, up to STAGES ahead and across tiles; each consumer warpgroup
//   multiplies its part of the tile's rows. While a consumer stores its result, the producer loads
//   the next tile.
// TRANSPOSED 1: the transpose of the product is stored. For few tokens: the weight is a, and the
//   tokens are the columns of a narrow tile.
// OVERLAPPED 1: consumers store a tile during the first k steps of the next one, for products of
//   many tiles. Registers hold the accumulators of two tiles, so TILE_N is at most 192.
// PARTS 2: half of a tile's columns belong to gate, half are the same columns of up, so that one
//   thread has both.
// CLUSTER 2, SPLITS 1: two adjacent blocks compute tiles one below the other. Each loads its own
//   tile of a and half of their shared tile of b, which TMA multicasts to both.
// SPLITS = CLUSTER > 1: the blocks of a cluster split the k steps of one tile and add their
//   accumulators through distributed shared memory (common/hopper/split_k.cuh); one tile per
//   cluster.
// Shared memory, dynamic: STAGES * (TILE_M + TILE_N) * 128 bytes (MN-major operands: rounded up to
//   64 rows), a | b | a | ..; then the buffers of Staged-, Overlapped- or TransposedEpilogue, or
//   the accumulators that SplitEpilogue receives. Static: two barriers per stage, one for the
//   epilogue.
// Macros: DTYPE float16|bfloat16; TILE_M, TILE_N, STAGES; CONSUMERS 1|2 of at least 64 rows each,
//   with TILE_M / CONSUMERS / 64 * TILE_N at most 256 (the accumulators); CLUSTER, SPLITS 1..8;
//   BLOCKS_PER_SM; THREADS 128 * (CONSUMERS + 1); MAJOR_A, MAJOR_B K|MN; TRANSPOSED 0|1; OVERLAPPED
//   0|1, with SPLITS 1, TRANSPOSED 0, PARTS 1, KEEPS 0 and at least TILE_N / 32 k steps; PARTS 1|2;
//   ACTIVATION NoActivation|Relu|GeluErf|GeluTanh|Silu; KEEPS 0|1.
// Tensor maps: boxes as documented at DenseOperands (PARTS 2: PairedOperands) and the epilogues,
//   swizzled; out-of-bounds elements read as zeros and are not written.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "common/hopper/gemm.cuh"
#include "common/hopper/split_k.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/linear_transform.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::Major;

constexpr int kMulticast = SPLITS > 1 ? 1 : CLUSTER;
using Shape = cukit::GemmShape<T, TILE_M, TILE_N, kMulticast, CONSUMERS, Major::MAJOR_A,
                               Major::MAJOR_B>;
using Block = cukit::WarpSpecialized<CONSUMERS, 40, BLOCKS_PER_SM>;
template <int Columns>
using Transform =
    cukit::LinearTransform<T, cukit::ACTIVATION<T>, PARTS, KEEPS != 0, Columns, TRANSPOSED != 0>;
using Staged = cukit::StagedEpilogue<Shape, T, Transform<TILE_N / PARTS>>;
using Overlapped = cukit::OverlappedEpilogue<Shape, T, Transform<32>>;
using Transposed = cukit::TransposedEpilogue<Shape, T, Transform<TILE_N>>;
using Split = cukit::SplitEpilogue<Shape, T, SPLITS, TRANSPOSED != 0,
                                   Transform<cukit::slice_columns(TILE_N / PARTS, SPLITS)>>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(SPLITS == 1 || SPLITS == CLUSTER, "a cluster either splits k or shares b");
static_assert(!OVERLAPPED || (SPLITS == 1 && PARTS == 1 && !TRANSPOSED && !KEEPS),
              "registers hold two tiles of accumulators only for a plain product");
static_assert(PARTS == 1 || !TRANSPOSED, "gate and up are columns of the product");

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, BLOCKS_PER_SM)
    linear_sm90(const __grid_constant__ cukit::TensorMap a,        // [m, k]; MN-major: [k, m]
                const __grid_constant__ cukit::TensorMap b,        // [n, k]; MN-major: [k, n]
                const __grid_constant__ cukit::TensorMap up,       // [n, k]; only with PARTS 2
                const __grid_constant__ cukit::TensorMap out,      // [m, n]; TRANSPOSED: [n, m]
                const __grid_constant__ cukit::TensorMap kept,     // like out; only with KEEPS
                const __grid_constant__ cukit::TensorMap kept_up,  // with KEEPS and PARTS 2
                const T* bias,     // [n], TRANSPOSED: [m]; or null
                T* out_elements,   // like out; only with SPLITS > 1
                T* kept_elements,  // [m, PARTS * n] or transposed; with SPLITS > 1 and KEEPS
                const cukit::LinearParameters parameters) {
  const cukit::GemmParameters& p = parameters.gemm;
  __shared__ cukit::Pipeline<STAGES> pipeline;
  __shared__ cukit::StageBarriers<1> arrived;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  constexpr int kRows = kMulticast * TILE_M;
  constexpr int kColumns = TILE_N / PARTS;
  const cukit::DenseTiles<kMulticast> schedule{{(p.m + kRows - 1) / kRows,
                                                (p.n + kColumns - 1) / kColumns, p.raster_group,
                                                p.steps, SPLITS}};

  const auto operands = [&] {
    if constexpr (PARTS == 2) {
      return cukit::PairedOperands<Shape>{&a, &b, &up, p.m, p.n, parameters.box_a, parameters.box_b};
    } else {
      return cukit::DenseOperands<Shape>{&a, &b, p.m, p.n, parameters.box_a, parameters.box_b};
    }
  }();
  if constexpr (kMulticast == 1) operands.template clear_rest<STAGES>(stages);
  Block::prepare<kMulticast>([&] {
    pipeline.init(kMulticast * Block::kConsumerWarps);
    arrived.init(1);
  });
  if constexpr (SPLITS > 1) cukit::cluster_arrive();  // the epilogue waits for the other blocks
  Block::run(
      [&] {
        if (threadIdx.x == 0) cukit::produce(pipeline, stages, schedule, operands);
        cukit::leave_cluster<kMulticast>();
        if constexpr (SPLITS > 1) {
          __syncwarp();
          cukit::cluster_wait();
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        const cukit::SharedProduct<Shape> product(stages, consumer);
        unsigned char* const buffers = stages + STAGES * Shape::kStageBytes;
        const int features = TRANSPOSED ? p.m : p.n;
#if SPLITS > 1
        Split epilogue{reinterpret_cast<float4*>(buffers), &arrived, out_elements, kept_elements, p.m,
                       p.n, consumer, {bias, features}};
        cukit::consume(pipeline, schedule, product, epilogue);
#elif OVERLAPPED
        Overlapped epilogue{buffers, &out, p.m, p.n, consumer, {bias, features}};
        cukit::consume_overlapped(pipeline, schedule, product, epilogue);
#elif TRANSPOSED
        Transposed epilogue{buffers, &out, p.m, p.n, consumer, {bias, features}, &kept};
        cukit::consume(pipeline, schedule, product, epilogue);
#else
        Staged epilogue{buffers, &out, p.m, p.n, consumer, {bias, features}, &kept, &kept_up};
        cukit::consume(pipeline, schedule, product, epilogue);
#endif
        cukit::leave_cluster<kMulticast>();
      });
}
