// Sampled dense product (SDDMM) on Hopper: the blocks of a dense product that are in a pattern.
// Persistent thread blocks, TMA, wgmma.
//
//   values[index of (i, j)] = block (i, j) of op(a) op(b)     for each block of the pattern
//
// Mapping: a tile has up to COLUMNS / BLOCK entries of a group of block rows, as in
//   bsr_matmul_sm90: the rows of op(a) are multiplied by the entries' columns of op(b), gathered
//   side by side, and the blocks that are in the pattern are stored. A tile with fewer entries
//   loads its last entry repeatedly. The host assigns the tiles to the blocks of the grid.
// Shared memory, bytes: as bsr_matmul_sm90, with store buffers of 64 x min(BLOCK, 64).
// Macros: DTYPE, BLOCK, COLUMNS, STAGES, THREADS: as bsr_matmul_sm90. CLUSTER 1. TILE_K 32|64;
//   A_TRANSPOSED, B_TRANSPOSED 0|1.
// Tensor maps, swizzled by the bytes of their boxes' rows: a, boxes of [BLOCK, TILE_K] from [m, k],
//   A_TRANSPOSED [TILE_K, 64] from [k, m]; b, boxes of [TILE_K, up to 64] from [k, n],
//   B_TRANSPOSED [BLOCK, TILE_K] from [n, k]; values [blocks * BLOCK, BLOCK], boxes of up to [64,
//   64]. TMA reads zeros beyond k.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/bsr.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/bsr_sm90.cuh"

namespace {

using T = cukit::element_t;

constexpr int kPart = BLOCK < 64 ? BLOCK : 64;  // columns of a block in one swizzled part

using Shape =
    cukit::BsrShape<T, BLOCK, COLUMNS, TILE_K, A_TRANSPOSED, 64, !B_TRANSPOSED, kPart>;
using Store = cukit::PieceStore<T, Shape::kWidth, kPart>;

struct Tile {
  int row;    // first row of op(a)
  int entry;  // first of the tile's entries
  int count;  // of entries
  int first_step, end_step;

  CUKIT_DEVICE static Tile of(const int4& item) {
    return {item.x * Shape::kRows, item.y, item.z, 0, item.w};
  }
};

struct Operands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  using TileA = Shape::TileA::Tile;
  using TileB = Shape::TileB::Tile;
  const cukit::TensorMap* a;
  const cukit::TensorMap* b;
  const int* block_columns;

  CUKIT_DEVICE int bytes(const Tile&) const { return kStageBytes; }

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
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

  // Loads the columns of an entry to the columns of the tile that start at `first`.
  CUKIT_DEVICE void load_columns(unsigned char* stage_b, int first, cukit::Mbarrier* full,
                                 int column, int k) const {
    unsigned char* const tile = stage_b + first / Shape::kWidth * TileB::kBytes;
    const int within = first % Shape::kWidth;
    if constexpr (B_TRANSPOSED) {
      cukit::tma_load_2d(tile + within * TileB::kRowBytes, b, full, k, column);
    } else {
#pragma unroll
      for (int part = 0; part < BLOCK / kPart; ++part) {
        cukit::tma_load_2d(tile + (within / kPart + part) * TileB::kPartBytes, b, full,
                           column + kPart * part, k);
      }
    }
  }
};

struct Epilogue {
  unsigned char* buffers;
  const cukit::TensorMap* values;
  const int* block_indices;
  int consumer;

  CUKIT_DEVICE void store(const float (&acc)[Shape::kWidth / 2], const Tile& tile) const {
    const int first_row = Shape::row_group(consumer) * cukit::kWarpgroupRows;
    const int first_column = Shape::column_group(consumer) * Shape::kWidth;
    Store::store(acc, buffers + consumer * Store::kBytes, 1 + consumer,
                 [&](int piece, const unsigned char* buffer) {
                   const int column = first_column + piece * kPart;
                   const int slot = column / BLOCK;
                   if (slot >= tile.count) return;
#pragma unroll
                   for (int row = 0; row < Shape::kSlots; ++row) {
                     const int block_index =
                         block_indices[(tile.entry + slot) * Shape::kSlots + row];
                     if (block_index < 0) continue;
                     cukit::tma_store_2d(values, buffer + row * BLOCK * Store::Piece::kRowBytes,
                                         column % BLOCK, block_index * BLOCK + first_row);
                   }
                 });
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) bsr_sampled_sm90(
    const __grid_constant__ cukit::TensorMap a,       // [m, k]; A_TRANSPOSED [k, m]
    const __grid_constant__ cukit::TensorMap b,       // [k, n]; B_TRANSPOSED [n, k]
    const __grid_constant__ cukit::TensorMap values,  // [blocks * BLOCK, BLOCK]
    const int4* __restrict__ work,  // [blocks of the grid, turns]: group, first entry, count, steps
    const int* __restrict__ block_columns,  // [entries]
    const int* __restrict__ block_indices,  // [entries, kSlots]: of the row's block, or -1
    const int turns) {
  const Operands operands{&a, &b, block_columns};
  cukit::multiply_listed<Shape, Tile, STAGES>(
      work, turns,
      [&](auto& pipeline, unsigned char* stages, const auto& schedule) {
        if (threadIdx.x == 0) cukit::produce(pipeline, stages, schedule, operands);
      },
      [&](unsigned char* buffers, int consumer) {
        return Epilogue{buffers, &values, block_indices, consumer};
      });
}
