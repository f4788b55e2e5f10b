// Shared by the block-sparse products on mma.sync: 128 x 128 tiles of the result, k steps of 64,
// and the operands' layout in shared memory (common/tile.cuh).
//
// A tile covers 128 / BLOCK adjacent block rows, and each block column that they use is read once
// for all of them: tiles of a single block row of 16 or 32 rows would be bound by the copies of the
// other operand. A bit mask, uniform across a warp, marks the blocks that exist; the others are not
// multiplied and, in bsr_matmul_sm80, not loaded.
#pragma once

#include "common/platform.cuh"
#include "common/tile.cuh"

namespace cukit {

constexpr int kBsrTile = 128;
constexpr int kBsrTileK = 64;
constexpr int kBsrThreads = 256;
constexpr int kBsrWarpRows = 64;  // rows of a warp's part of the tile
constexpr int kBsrWarpColumns = 32;
constexpr int kBsrRowTiles = kBsrWarpRows / 16;
constexpr int kBsrColumnTiles = kBsrWarpColumns / 8;
constexpr int kBsrOperandBytes = kBsrTile * kBsrTileK * 2;
constexpr int kBsrStageBytes = 2 * kBsrOperandBytes;  // a | b

using BsrAccumulators = float[kBsrRowTiles][kBsrColumnTiles][4];

CUKIT_DEVICE int bsr_warp_row() {
  return static_cast<int>(threadIdx.x) / kWarpSize / 4 * kBsrWarpRows;
}
CUKIT_DEVICE int bsr_warp_column() {
  return static_cast<int>(threadIdx.x) / kWarpSize % 4 * kBsrWarpColumns;
}

// A tile of one operand: 128 of m or n by 64 of k. Transposed: the rows of the tile run along k, as
// in the matrix it is loaded from.
template <bool Transposed>
struct BsrOperandTile {
  static constexpr int kRows = Transposed ? kBsrTileK : kBsrTile;
  static constexpr int kCols = Transposed ? kBsrTile : kBsrTileK;

  // Visits this thread's 16-byte chunks: visit(shared address, position along m or n, along k).
  template <typename Visit>
  CUKIT_DEVICE static void for_chunks(unsigned tile, const Visit& visit) {
    constexpr int kChunks = kCols / 8;
    // Opaque, so that positions are recomputed for each stage instead of being kept in registers.
    const int thread = static_cast<int>(opaque(threadIdx.x));
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kBsrThreads; ++i) {
      const int index = i * kBsrThreads + thread;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const unsigned at = tile + Swizzle<kCols>::offset(row, chunk);
      if constexpr (Transposed) {
        visit(at, 8 * chunk, row);
      } else {
        visit(at, row, 8 * chunk);
      }
    }
  }
};

// Operand a of a warp: load(r, row, k, bytes) reads the 16 x 16 fragment at (row, k) of the warp's
// part, in the tile `bytes` after the first one.
template <bool Transposed>
struct BsrLeft {
  using Read = Operand<Transposed ? kBsrTile : kBsrTileK, kBsrWarpRows,
                       Transposed ? LaneOrder::ByColumn : LaneOrder::ByRow, Transposed>;
  Read read;

  CUKIT_DEVICE explicit BsrLeft(unsigned tile)
      : read(tile, Transposed ? 0 : bsr_warp_row(), Transposed ? bsr_warp_row() : 0) {}
  CUKIT_DEVICE void load(unsigned (&r)[4], int row, int k, int bytes) const {
    read(r, Transposed ? k : row, Transposed ? row : k, bytes);
  }
};

// Operand b of a warp: load(r, column, k, bytes) reads the two adjacent 16 x 8 fragments at
// (k, column).
template <bool Transposed>
struct BsrRight {
  using Read = Operand<Transposed ? kBsrTile : kBsrTileK,
                       Transposed ? kBsrWarpColumns : kBsrTileK,
                       Transposed ? LaneOrder::ByRow : LaneOrder::ByColumn, Transposed>;
  Read read;

  CUKIT_DEVICE explicit BsrRight(unsigned tile)
      : read(tile, Transposed ? 0 : bsr_warp_column(), Transposed ? bsr_warp_column() : 0) {}
  CUKIT_DEVICE void load(unsigned (&r)[4], int column, int k, int bytes) const {
    read(r, Transposed ? k : column, Transposed ? column : k, bytes);
  }
};

// Runs the cp.async pipeline of a tile: start(stage, buffer) issues the copies of a stage, and
// multiply(stage, buffer) consumes it. `Stages` buffers; called by all threads.
template <int Stages, typename Start, typename Multiply>
CUKIT_DEVICE void bsr_stages(int count, const Start& start, const Multiply& multiply) {
#pragma unroll
  for (int stage = 0; stage < Stages - 1; ++stage) {
    if (stage < count) start(stage, stage);
    cp_async_commit();
  }
  int buffer = 0;
  for (int stage = 0; stage < count; ++stage) {
    cp_async_wait<Stages - 2>();
    __syncthreads();  // this stage has arrived, and the buffer of the previous one is free
    const int next = stage + Stages - 1;
    if (next < count) start(next, buffer == 0 ? Stages - 1 : buffer - 1);
    cp_async_commit();
    multiply(stage, buffer);
    if (++buffer == Stages) buffer = 0;
  }
  cp_async_wait<0>();
}

}  // namespace cukit
