// Dense matrix product on Hopper: persistent blocks, TMA, wgmma.
//
//   out = a b^T
//
// Mapping: the blocks of a persistent grid walk over TILE_M x TILE_N tiles of the result, in groups of
//   `group` rows of tiles (common/hopper/tile_scheduler.cuh). A thread of the first warpgroup loads
//   TILE_K columns of a and b at a time, up to STAGES ahead and across tiles; each of the two consumer
//   warpgroups multiplies half of the tile's rows. While a consumer stores its result, the producer
//   loads the next tile's operands.
// CLUSTER 2: two neighbouring blocks compute tiles one below the other. Each loads its own tile of a and
//   half of their common tile of b, which TMA writes to both. A stage is free when the consumers of both
//   blocks have released it.
// Shared memory, bytes: STAGES * (TILE_M + TILE_N) * TILE_K * 2 + 2 * buffers * 64 * 64 * 2, dynamic:
//   stages (a | b) | 64 x 64 pieces of out, two for each consumer where TILE_N is a multiple of 128, else
//   one; all in rows of 128 bytes, swizzled. Static: two barriers a stage.
// Macros: DTYPE float16|bfloat16; TILE_M 128|256; TILE_N a multiple of 64 up to 256, with
//   TILE_M * TILE_N at most 32768 (the accumulators); STAGES 2..; CLUSTER 1|2; THREADS 384.
// Tensor maps: boxes of [TILE_M, 64] (a), [TILE_N / CLUSTER, 64] (b) and [64, 64] (out), swizzled by 128
//   bytes; they read zeros outside their tensors and write nothing there.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "common/hopper/gemm.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using Shape = cukit::GemmShape<T, TILE_M, TILE_N, CLUSTER>;
using Block = cukit::WarpSpecialized<Shape::kConsumers, 40>;
using Epilogue = cukit::StagedEpilogue<Shape, T>;

static_assert(THREADS == Block::kThreads, "a producer and two consumers");

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, 1) matmul_tma_sm90(
    const __grid_constant__ cukit::TensorMap a,    // [m, k]
    const __grid_constant__ cukit::TensorMap b,    // [n, k]
    const __grid_constant__ cukit::TensorMap out,  // [m, n]
    const cukit::GemmParameters p) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  constexpr int kClusterRows = CLUSTER * TILE_M;
  const cukit::DenseTiles<CLUSTER> schedule{{(p.m + kClusterRows - 1) / kClusterRows,
                                             (p.n + TILE_N - 1) / TILE_N, p.group, p.steps,
                                             1}};

  Block::prepare<CLUSTER>([&] { pipeline.init(CLUSTER * Block::kConsumerWarps); });
  Block::run(
      [&] {
        const cukit::DenseOperands<Shape> operands{&a, &b, p.m};
        if (threadIdx.x == 0) cukit::produce(pipeline, stages, schedule, operands);
        cukit::leave_cluster<CLUSTER>();
      },
      [&] {
        const int group = Block::consumer_group();
        const cukit::SharedProduct<Shape> product(stages, group);
        const Epilogue epilogue{stages + STAGES * Shape::kStageBytes, &out, p.m, p.n, group, {}};
        cukit::consume(pipeline, schedule, product, epilogue);
        cukit::leave_cluster<CLUSTER>();
      });
}
