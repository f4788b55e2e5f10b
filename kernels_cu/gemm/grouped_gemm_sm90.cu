// Grouped products, each group of rows with its own matrix, on Hopper: persistent blocks, TMA,
// wgmma.
//
//   RAGGED M   out[r] = f(x[r] weights[g]^T)          for the rows r of group g; with PARTS 2
//              out[r] = f(x[r] gate[g]^T) * (x[r] up[g]^T), weights[g] = (gate[g] | up[g])
//   RAGGED N   the same for short groups: weights are operand a, rows are columns of a narrow tile
//   RAGGED K   out[g] = sum of a[r]^T b[r] over the rows r of group g: gradients of weights
//
// Mapping: persistent blocks compute the tiles of all groups, group by group
//   (gemm/grouped_tiles.cuh); they derive the tiles from offsets or counts in device memory.
//   Otherwise as linear_sm90.cu. Groups may have any number of rows, including 0; rows are not
//   padded in memory.
// Shared memory, dynamic: STAGES * (a | b), then the epilogue's buffers, as in linear_sm90.cu.
//   Static: two barriers per stage, 4 * (GROUPS + 1) bytes for the first tile of each group.
// Macros: DTYPE float16|bfloat16; RAGGED M|N|K; TILE_M, TILE_N, STAGES, CONSUMERS, BLOCKS_PER_SM,
//   THREADS, MAJOR_A, MAJOR_B, PARTS, ACTIVATION, KEEPS as in linear_sm90.cu; GROUPS, the maximum
//   number of groups.
// Tensor maps: [matrices, rows, columns], as in grouped_tiles.cuh.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/grouped_gemm.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/grouped_tiles.cuh"
#include "gemm/linear_transform.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::Major;
using cukit::Ragged;

constexpr Ragged kRagged = Ragged::RAGGED;
using Shape =
    cukit::GemmShape<T, TILE_M, TILE_N, 1, CONSUMERS, Major::MAJOR_A, Major::MAJOR_B>;
using Block = cukit::WarpSpecialized<CONSUMERS, 40, BLOCKS_PER_SM>;
using Transform = cukit::LinearTransform<T, cukit::ACTIVATION<T>, PARTS, KEEPS != 0, TILE_N / PARTS, false>;
using Epilogue = cukit::GroupedEpilogue<Shape, T, kRagged, Transform>;
using Schedule = cukit::GroupedTiles<kRagged, TILE_M, TILE_N / PARTS>;
using Operands = cukit::GroupedOperands<Shape, kRagged, PARTS>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(PARTS == 1 || kRagged == Ragged::M, "gate and up are columns of the product");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    grouped_gemm_sm90(const __grid_constant__ cukit::TensorMap a,
                      const __grid_constant__ cukit::TensorMap b,
                      const __grid_constant__ cukit::TensorMap out,
                      const __grid_constant__ cukit::TensorMap kept,  // only with KEEPS
                      const int* __restrict__ ends,  // offsets [groups + 1], or counts [groups]
                      const __grid_constant__ cukit::GroupedParameters p) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  __shared__ int starts[GROUPS + 1];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::Groups groups{ends, p.longest, p.fixed_capacity != 0};
  if (kRagged != Ragged::K && threadIdx.x < cukit::kWarpSize) {
    cukit::count_tiles<GROUPS>(starts, groups, p.groups, kRagged == Ragged::M ? TILE_M : TILE_N);
  }
  const Schedule schedule{p, groups, starts};

  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          cukit::produce(pipeline, stages, schedule, Operands{&a, &b, p.m, p.n});
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        const cukit::GroupedProduct<Shape> product(stages, consumer);
        Epilogue epilogue{stages + STAGES * Shape::kStageBytes, &out, &kept, p.m, p.n, consumer,
                          Transform{nullptr, p.n}};
        cukit::consume(pipeline, schedule, product, epilogue);
      });
}
