// Tile schedulers: the tiles of a result that each block of a persistent grid computes, and their
// order.
//
//   static   block b of g takes tiles b, b + g, ...: every warp computes the
//            indices itself, without communication.
//   dynamic  an atomic counter in global memory assigns tiles to free blocks: for tiles of
//            different cost. One thread of a block draws the tiles, and publishes each with the
//            first pipeline stage that it fills for that tile.
//   matrix   tiles of a matrix product in a rasterisation order that keeps operands in L2,
//            optionally split along k.
//   stream-K the same, where the last tiles, fewer than one per block, are divided along k into one
//            equal share per block.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Index of this block's tile number `turn` in the static schedule; the same index for all blocks of
// a cluster.
template <int ClusterSize = 1>
CUKIT_DEVICE int static_tile(int turn) {
  return turn * (static_cast<int>(gridDim.x) / ClusterSize) +
         static_cast<int>(blockIdx.x) / ClusterSize;
}

// Assigns tiles by a counter that starts at the number of blocks of the grid. A tile is drawn while
// the previous one is processed, which hides the latency of the atomic operation.
class DynamicTiles {
 public:
  CUKIT_DEVICE int tile() const { return tile_; }
  CUKIT_DEVICE void draw(int* counter) { tile_ = atomicAdd(counter, 1); }

 private:
  int tile_ = static_cast<int>(blockIdx.x);
};

// A work item of a matrix product: a tile of the result, and its range of k steps.
struct MatrixTile {
  int m, n;  // tile index along each axis
  int first_step, end_step;
};

// Iterates over the tiles of a matrix in rasterisation groups of `group` rows of tiles, column by
// column within a group: the tiles in flight share few rows of a and few columns of b, which stay
// in L2. `splits` consecutive indices share a tile and split its k steps.
struct MatrixTiles {
  int tiles_m, tiles_n;
  int group;
  int steps;  // of k, per tile
  int splits;

  CUKIT_DEVICE int count() const { return tiles_m * tiles_n * splits; }

  CUKIT_DEVICE MatrixTile at(int index) const {
    const int split = index % splits;
    const int tile = index / splits;
    int first = 0, within = tile;
    if (group < tiles_m) {  // skips the divisions, which delay the first load, for a single group
      const int per_group = group * tiles_n;
      first = tile / per_group * group;
      within = tile % per_group;
    }
    const int rows = min(group, tiles_m - first);
    const int column = rows == 1 ? within : within / rows;
    return {first + within - column * rows, column, steps * split / splits,
            steps * (split + 1) / splits};
  }
};

// A work item of StreamKTiles: a tile, and the range of its k steps that the block computes.
struct StreamKTile {
  int m, n;
  int first_step, end_step;
  int shared;  // index among the shared tiles, or -1
};

// The first `whole` tiles, a multiple of the number of blocks or all tiles, go to one block each
// under the static schedule. The concatenated steps of the others are divided into one contiguous
// share per block: all blocks have the same work to within one step, and at most the first and last
// piece of a share are not complete tiles. Osama et al., "Stream-K: Work-centric Parallel
// Decomposition for Dense Matrix-Matrix Multiplication on the GPU". The number of shared steps is 0
// or at least the number of blocks, and the product of the two is below 2^32.
struct StreamKTiles {
  using Tile = StreamKTile;
  MatrixTiles tiles;
  int whole;

  CUKIT_DEVICE bool tile(int turn, Tile& tile) const {
    const int blocks = gridDim.x;
    const int index = static_tile(turn);
    if (index < whole) {
      const MatrixTile found = tiles.at(index);
      tile = {found.m, found.n, found.first_step, found.end_step, -1};
      return true;
    }
    if (whole == tiles.count()) return false;
    const int begin = first_unit(blockIdx.x);
    const int end = first_unit(blockIdx.x + 1);
    const int shared = begin / tiles.steps + turn - whole / blocks;
    const int first_step = max(begin - shared * tiles.steps, 0);
    const int end_step = min(end - shared * tiles.steps, tiles.steps);
    if (first_step >= end_step) return false;
    const MatrixTile found = tiles.at(whole + shared);
    tile = {found.m, found.n, first_step, end_step, shared};
    return true;
  }

  // ---- Tiles shared by several blocks ----

  CUKIT_DEVICE bool in_pieces(const Tile& tile) const {
    return tile.end_step - tile.first_step < tiles.steps;
  }
  // Blocks first_block .. last_block have one piece each of a shared tile.
  CUKIT_DEVICE int first_block(int shared) const { return block_of(shared * tiles.steps); }
  CUKIT_DEVICE int last_block(int shared) const { return block_of((shared + 1) * tiles.steps - 1); }

  // Slot of `block`'s piece of a shared tile: 0 .. 2 * gridDim.x - 1.
  CUKIT_DEVICE int slot(int block, int shared) const {
    return 2 * block + (first_unit(block) / tiles.steps == shared ? 0 : 1);
  }

 private:
  CUKIT_DEVICE unsigned units() const { return (tiles.count() - whole) * tiles.steps; }

  // First unit of a block's share. Units are the concatenated k steps of the shared tiles.
  CUKIT_DEVICE int first_unit(unsigned block) const { return units() * block / gridDim.x; }

  // The last block whose share starts at or before `unit`.
  CUKIT_DEVICE int block_of(unsigned unit) const { return ((unit + 1) * gridDim.x - 1) / units(); }
};

}  // namespace cukit
