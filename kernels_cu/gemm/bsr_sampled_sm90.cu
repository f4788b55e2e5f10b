// The blocks of a dense product that a pattern names, on Hopper: persistent blocks, TMA, wgmma.
//
//   values[number of (i, j)] = block (i, j) of op(a) op(b)     for each block of the pattern
//
// Mapping: a tile has up to COLUMNS / BLOCK blocks of one block row (gemm/bsr_sm90.cuh): BLOCK rows of
//   op(a) are multiplied with the columns of op(b) that the tile's blocks have, gathered side by side.
//   Where a tile has fewer blocks, its last is loaded repeatedly and stored once. The host deals the
//   tiles to the blocks of the grid.
// Shared memory, bytes: as bsr_matmul_sm90.
// Macros: DTYPE, BLOCK, COLUMNS, TILE_K, STAGES, THREADS: as bsr_matmul_sm90. A_TRANSPOSED,
//   B_TRANSPOSED 0|1.
// Tensor maps, swizzled by the bytes of their boxes' rows: a, boxes of [BLOCK, TILE_K] from [m, k],
//   A_TRANSPOSED [TILE_K, 64] from [k, m]; b, boxes of [TILE_K, 64] from [k, n], B_TRANSPOSED
//   [BLOCK, TILE_K] from [n, k]. Steps beyond k read zeros.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/bsr.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/bsr_sm90.cuh"

namespace {

using T = cukit::element_t;
using Shape = cukit::BsrShape<T, BLOCK, COLUMNS, TILE_K, A_TRANSPOSED, !B_TRANSPOSED>;
using Block = cukit::WarpSpecialized<Shape::kConsumers, 40>;

static_assert(THREADS == Block::kThreads, "a producer and two consumers");

struct Tile {
  int row;    // first row of op(a)
  int entry;  // first of the tile's blocks
  int count;  // of blocks
  int first_step, end_step;

  CUKIT_DEVICE static Tile of(const int4& item) {
    return {item.x * BLOCK, item.y, item.z, 0, item.w};
  }
};

struct Operands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  const cukit::TensorMap* a;
  const cukit::TensorMap* b;
  const int* block_columns;

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
    using TileA = Shape::TileA::Tile;
    const int k = step * TILE_K;
    if constexpr (A_TRANSPOSED) {
      TileA::load(stage, a, full, tile.row, k);
    } else {
      TileA::load(stage, a, full, k, tile.row);
    }
#pragma unroll
    for (int slot = 0; slot < COLUMNS / BLOCK; ++slot) {
      const int column = block_columns[tile.entry + min(slot, tile.count - 1)] * BLOCK;
      load_columns(stage + TileA::kBytes, slot * BLOCK, full, column, k);
    }
  }

  // The columns of a block, which are `first` and on of the tile.
  CUKIT_DEVICE void load_columns(unsigned char* stage_b, int first, cukit::Mbarrier* full,
                                 int column, int k) const {
    using TileB = Shape::TileB::Tile;
    unsigned char* const tile = stage_b + first / Shape::kWidth * TileB::kBytes;
    const int within = first % Shape::kWidth;
    if constexpr (B_TRANSPOSED) {
      cukit::tma_load_2d(tile + within * TileB::kRowBytes, b, full, k, column);
    } else {
#pragma unroll
      for (int part = 0; part < BLOCK / 64; ++part) {
        cukit::tma_load_2d(tile + (within / 64 + part) * TileB::kPartBytes, b, full,
                           column + 64 * part, k);
      }
    }
  }
};

using Store = cukit::TileStore<T, Shape::kWidth, false>;

struct Epilogue {
  unsigned char* buffers;
  const cukit::TensorMap* values_map;
  T* values;
  int consumer;

  CUKIT_DEVICE void store(const float (&sums)[Shape::kWidth / 2], const Tile& tile) const {
    const int first_row = Shape::row_group(consumer) * cukit::kWarpgroupRows;
    const int first_column = Shape::column_group(consumer) * Shape::kWidth;
#if DIRECT
    cukit::store_rows<T>(sums, [&](int row, int column) -> T* {
      const int slot = (first_column + column) / BLOCK;
      if (slot >= tile.count) return nullptr;
      const long long block_row = static_cast<long long>(tile.entry + slot) * BLOCK + first_row + row;
      return values + block_row * BLOCK + (first_column + column) % BLOCK;
    });
#else
    Store::store(sums, buffers + consumer * Store::kBytes, 1 + consumer,
                 [&](int piece, const unsigned char* buffer) {
                   const int column = first_column + piece * 64;
                   const int slot = column / BLOCK;
                   if (slot >= tile.count) return;
                   cukit::tma_store_2d(values_map, buffer, column % BLOCK,
                                       (tile.entry + slot) * BLOCK + first_row);
                 });
#endif
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) bsr_sampled_sm90(
    const __grid_constant__ cukit::TensorMap a,       // [m, k]; A_TRANSPOSED [k, m]
    const __grid_constant__ cukit::TensorMap b,       // [k, n]; B_TRANSPOSED [n, k]
    const __grid_constant__ cukit::TensorMap values_map,
    T* __restrict__ values,                           // [blocks, BLOCK, BLOCK]
    const int4* __restrict__ work,  // [blocks of the grid, turns]: block row, first block, count, steps
    const int* __restrict__ block_columns,  // [blocks]
    const int turns) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::ListedTiles<Tile> schedule{work, turns};

  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        const Operands operands{&a, &b, block_columns};
        if (threadIdx.x == 0) cukit::produce(pipeline, stages, schedule, operands);
      },
      [&] {
        const int consumer = Block::consumer_group();
        const cukit::BsrProduct<Shape> product(stages, consumer);
        const Epilogue epilogue{stages + STAGES * Shape::kStageBytes, &values_map, values, consumer};
        cukit::consume(pipeline, schedule, product, epilogue);
      });
}
