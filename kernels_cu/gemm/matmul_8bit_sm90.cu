// Products of 8-bit matrices on Hopper: int8 and FP8 (e4m3), with scales per tensor, row or block.
//
//   out = (a - zero_point) b^T * a_scale * b_scale + bias
//
// Mapping: as in linear_sm90.cu. A persistent grid computes TILE_M x TILE_N tiles of the result,
//   with a producer thread and CONSUMERS warpgroups of TILE_M / CONSUMERS rows each; a k step is
//   128.
// Accumulation, by PARTIALS:
//   0   in the tensor cores over all of k: exact for int8, with about 14 bits for FP8
//   1|2 FP8: partial sums over 128 of k, added in float (common/hopper/promoted_product.cuh)
// Scales, by BLOCKS:
//   0   per row or per tensor; applied in the epilogue, with zero points and bias
//   1   per 128 elements of a row of a and per 128 x 128 block of b; applied to partial sums
//       (PARTIALS 1|2). The epilogue adds the bias
// SPLITS > 1: the blocks of a cluster split the k steps of one tile and add their accumulators
//   through distributed shared memory (common/hopper/split_k.cuh); one tile per cluster, at least
//   one step per block.
// Shared memory, bytes: STAGES * ((TILE_M + TILE_N) * 128 + scales), dynamic: stages (a | b | with
//   BLOCKS the scales of a's rows and of one to three column blocks, rounded up to 1024); then with
//   RESULT 2 TILE_M * TILE_N * 2: store buffers of 64, 32 or 16 columns, the widest that divides
//   TILE_N; with SPLITS > 1 the received accumulators. Static: two barriers per stage, one for the
//   split.
// Macros: CODE Int8|Float8E4M3; OUT float16|bfloat16|float32|int32 (int32: the int8 accumulators);
//   TILE_M 64|128|256; TILE_N a multiple of 16 up to 256 (with BLOCKS 240); CONSUMERS 1|2; STAGES
//   2..; SPLITS 1|2|4|8; CLUSTER = SPLITS; PARTIALS 0|1|2, 2 only with 64 rows per consumer and
//   TILE_N up to 128; BLOCKS 0|1; RESULT 0 Pairs, 1 Rows, 2 Staged
//   (common/hopper/scaled_epilogue.cuh), not 2 with SPLITS > 1; BLOCKS_PER_SM;
//   THREADS 128 * (CONSUMERS + 1).
// Tensor maps: boxes of [box_a, 128] (a), [box_b, 128] (b) and [64, piece] (out, RESULT 2),
//   swizzled by the bytes of their rows; with BLOCKS [1, TILE_M] (scales of a, [ceil(k / 128), m]).
// Architecture: sm_90 (sm_90a) only. Accumulates in a fixed order: deterministic.
// Reference: cukit/reference/gemm_8bit.py.
#include "common/hopper/gemm.cuh"
#include "common/hopper/promoted_product.cuh"
#include "common/hopper/scaled_epilogue.cuh"
#include "common/index.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using Code = cukit::CODE;
using Out = cukit::OUT;
constexpr auto kPath = static_cast<cukit::ResultPath>(RESULT);

using Shape = cukit::GemmShape<Code, TILE_M, TILE_N, 1, CONSUMERS>;
using Block = cukit::WarpSpecialized<CONSUMERS, 40, BLOCKS_PER_SM>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(!BLOCKS || PARTIALS > 0, "scales per block need partial sums");
static_assert(SPLITS == CLUSTER, "a cluster splits k");

#if BLOCKS
using Scales = cukit::BlockScales<Shape>;
using Operands = cukit::BlockScaledOperands<Shape>;
constexpr int kArrivals = Operands::kArrivals;
#else
using Scales = cukit::UnitScales;
using Operands = cukit::DenseOperands<Shape>;
constexpr int kArrivals = 1;
#endif

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_8bit_sm90(
        const __grid_constant__ cukit::TensorMap a,  // [m, k]
        const __grid_constant__ cukit::TensorMap b,  // [n, k]
#if RESULT == 2
        const __grid_constant__ cukit::TensorMap out_map,  // [m, n]
#endif
#if BLOCKS
        const __grid_constant__ cukit::TensorMap a_scales,  // [ceil(k / 128), m]
        const float* __restrict__ b_scales,                 // [ceil(n / 128), ceil(k / 128)]
#else
        const float* __restrict__ a_scales,           // [m], [1] or null: 1
        const float* __restrict__ b_scales,           // [n], [1] or null: 1
        const signed char* __restrict__ zero_points,  // like a_scales, or null: 0
        const int* __restrict__ column_sums,          // [n]: sums of b along k; with zero_points
#endif
        const Out* __restrict__ bias,  // [n] or null
        Out* __restrict__ out,         // [m, n]
        const cukit::QuantizedParameters p) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::GemmParameters& size = p.linear.gemm;
  const cukit::DenseTiles<> schedule{{(size.m + TILE_M - 1) / TILE_M,
                                      (size.n + TILE_N - 1) / TILE_N, size.raster_group, size.steps,
                                      SPLITS}};
#if SPLITS > 1
  __shared__ cukit::StageBarriers<1> arrived;
#endif

  const cukit::DenseOperands<Shape, Operands::kStageBytes> matrices{
      &a, &b, size.m, size.n, p.linear.box_a, p.linear.box_b};
#if BLOCKS
  const int column_blocks = (size.n + cukit::kScaleBlock - 1) / cukit::kScaleBlock;
  const Operands operands{matrices, &a_scales, {b_scales, size.steps, column_blocks}};
#else
  const Operands& operands = matrices;
#endif
  operands.clear_rest<STAGES>(stages);
  Block::prepare([&] {
    pipeline.init(Block::kConsumerWarps, kArrivals);
#if SPLITS > 1
    arrived.init(1);
#endif
  });
  if constexpr (SPLITS > 1) cukit::cluster_arrive();  // the epilogue waits for the other blocks
  Block::run(
      [&] {
        if (threadIdx.x == 0) cukit::produce(pipeline, stages, schedule, operands);
        if constexpr (SPLITS > 1) {
          __syncwarp();
          cukit::cluster_wait();
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
#if BLOCKS
        const cukit::ScaledResult<Out> result{{nullptr, 0}, {nullptr, 0}, nullptr, nullptr,
                                              bias,         out,          size.m,  size.n};
        const Scales scales{consumer};
#else
        const cukit::ScaledResult<Out> result{
            {a_scales, p.a_stride}, {b_scales, p.b_stride}, zero_points, column_sums,
            bias,                   out,                    size.m,      size.n};
        const Scales scales{};
#endif
        unsigned char* const buffers = stages + STAGES * Operands::kStageBytes;
#if SPLITS > 1
        using Epilogue = cukit::ScaledSplitEpilogue<Shape, Out, kPath, SPLITS>;
        Epilogue epilogue{result, consumer, {reinterpret_cast<float4*>(buffers), &arrived}};
#elif RESULT == 2
        cukit::ScaledEpilogue<Shape, Out, kPath> epilogue{result, consumer, buffers, &out_map};
#else
        cukit::ScaledEpilogue<Shape, Out, kPath> epilogue{result, consumer};
#endif
#if PARTIALS
        const cukit::PromotedProduct<Shape, Scales, PARTIALS> product(stages, consumer, scales);
#else
        const cukit::SharedProduct<Shape> product(stages, consumer);
#endif
        cukit::consume(pipeline, schedule, product, epilogue);
      });
}
