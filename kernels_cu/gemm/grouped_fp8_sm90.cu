// Grouped FP8 products with scales per block, on Hopper; each group of rows has its own matrix.
//
//   out[r] = sum over k of x[r, k] x_scale[r, k / 128] weights[g][:, k] scale[g][:/128, k / 128]
//
// Mapping: persistent blocks compute the tiles of all groups (gemm/grouped_tiles.cuh, RAGGED M);
//   sums of 128 products are promoted (common/hopper/promoted_product.cuh), as in
//   matmul_8bit_sm90.cu.
// Shared memory, dynamic: STAGES * ((TILE_M + TILE_N) * 128 + 1024), stages (x | weights | scales);
//   then the buffers of StagedEpilogue. Static: two barriers per stage, 4 * (GROUPS + 1) bytes.
// Macros: OUT float16|bfloat16; TILE_M 64|128; TILE_N a multiple of 16 up to 256; STAGES; CONSUMERS
//   1|2; PARTIALS 1|2; BLOCKS_PER_SM; THREADS 128 * (CONSUMERS + 1); GROUPS.
// Tensor maps: x, weights and out as in grouped_tiles.cuh, with the 128-byte swizzle; scales of x
//   [ceil(k / 128), rows] in boxes of [1, TILE_M + 4].
// Architecture: sm_90 (sm_90a) only. Accumulates in a fixed order: deterministic.
// Reference: cukit/reference/grouped_gemm.py, grouped_gemm_fp8.
#include "common/codes.cuh"
#include "common/hopper/promoted_product.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/grouped_tiles.cuh"
#include "gemm/parameters.cuh"

namespace {

using cukit::GroupTile;
using cukit::Ragged;

using Out = cukit::OUT;
using Shape = cukit::GemmShape<cukit::Float8E4M3, TILE_M, TILE_N, 1, CONSUMERS>;
// The producer also searches for tiles and copies scales; with 40 registers it would spill.
using Block = cukit::WarpSpecialized<CONSUMERS, 56, BLOCKS_PER_SM>;
using Schedule = cukit::GroupedTiles<Ragged::M, TILE_M, TILE_N>;
using Epilogue = cukit::GroupedEpilogue<Shape, Out, Ragged::M, cukit::Identity>;
using Blocks = cukit::BlockScales<Shape>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");

// A box of scales must start at a multiple of 16 bytes, four rows, but groups start at any row:
// boxes start up to three rows before the tile.
constexpr int kScaleRows = TILE_M + 4;

CUKIT_DEVICE int rows_early(const GroupTile& tile) { return (tile.first_row() + tile.m) % 4; }

struct Operands {
  static constexpr int kStageBytes = Shape::kStageBytes + Blocks::kStageBytes;
  static constexpr int kArrivals = cukit::ColumnScales<Shape>::kArrivals;
  static constexpr int kScaleBytes = kScaleRows * static_cast<int>(sizeof(float));
  cukit::GroupedOperands<Shape, Ragged::M, 1> operands;
  const cukit::TensorMap* scales;
  cukit::ColumnScales<Shape> columns;  // scales of group 0

  static_assert(kScaleBytes + Blocks::kColumnBytes <= Blocks::kStageBytes,
                "scales fit behind the operands of a stage");

  CUKIT_DEVICE int bytes(const GroupTile&) const { return Shape::kStageBytes + kScaleBytes; }

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const GroupTile& tile,
                         int step) const {
    operands.load(stage, full, tile, step);
    const int row = tile.first_row() + tile.m - rows_early(tile);
    cukit::tma_load_2d(stage + Shape::kStageBytes, scales, full, row, step);
    auto own = columns;
    own.b += static_cast<long long>(tile.group) * own.blocks * own.steps;
    own.load(stage, full, tile.n, step);
  }
};

// BlockScales whose rows are offset by rows_early().
struct Scales {
  static constexpr int kStageBytes = Blocks::kStageBytes;
  using Factors = Blocks::Factors;
  Blocks blocks;

  class Cursor : public Blocks::Cursor {
   public:
    CUKIT_DEVICE Cursor(const Scales& scales, const GroupTile& tile)
        : Blocks::Cursor(scales.blocks, {tile.m / TILE_M, tile.n / TILE_N, 0, tile.end_step},
                         rows_early(tile)) {}
  };
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    grouped_fp8_sm90(const __grid_constant__ cukit::TensorMap x,
                     const __grid_constant__ cukit::TensorMap weights,
                     const __grid_constant__ cukit::TensorMap out,
                     const __grid_constant__ cukit::TensorMap x_scales,
                     const float* __restrict__ scales,  // [groups, ceil(n / 128), ceil(k / 128)]
                     const int* __restrict__ ends,      // offsets [groups + 1], or counts [groups]
                     const __grid_constant__ cukit::GroupedParameters p) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  __shared__ int starts[GROUPS + 1];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::Groups groups{ends, p.longest, p.fixed_capacity != 0};
  if (threadIdx.x < cukit::kWarpSize) {
    cukit::count_tiles<GROUPS>(starts, groups, p.groups, TILE_M);
  }
  const Schedule schedule{p, groups, starts};

  Block::prepare([&] { pipeline.init(Block::kConsumerWarps, Operands::kArrivals); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          const int blocks = (p.n + cukit::kScaleBlock - 1) / cukit::kScaleBlock;
          const Operands operands{{&x, &weights, 0, p.n}, &x_scales, {scales, p.steps, blocks}};
          cukit::produce(pipeline, stages, schedule, operands);
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        const Scales factors{{consumer}};
        const cukit::PromotedProduct<Shape, Scales, PARTIALS> product(stages, consumer, factors);
        Epilogue epilogue{stages + STAGES * Operands::kStageBytes, &out, nullptr, 0, p.n,
                          consumer, {}};
        cukit::consume(pipeline, schedule, product, epilogue);
      });
}
