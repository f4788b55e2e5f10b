// Tile schedulers: which tiles of a result the blocks of a persistent grid compute, and in which order.
//
//   static   block b of g takes tiles b, b + g, ...: every warp knows them without communication.
//   dynamic  a counter in global memory deals tiles to whoever is free: for tiles of unlike cost. One
//            thread of a block draws, and passes the tile on with the first stage that it fills.
//   matrix   tiles of a matrix product in an order that keeps operands in L2, optionally with the
//            steps of k split among several.
//   stream-K the same, where the last tiles, too few to give every block one, are cut along k into
//            as many equal shares as there are blocks.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// The tile of a block's turn, 0, 1, ..., under the static schedule. The blocks of a cluster take
// the same number: one tile is the cluster's.
template <int ClusterSize = 1>
CUKIT_DEVICE int static_tile(int turn) {
  return turn * (static_cast<int>(gridDim.x) / ClusterSize) +
         static_cast<int>(blockIdx.x) / ClusterSize;
}

// Deals tiles by a counter that starts with the number of blocks of the grid. A tile is drawn ahead,
// while the one before is worked on, so that nobody waits for the atomic operation.
class DynamicTiles {
 public:
  CUKIT_DEVICE int tile() const { return tile_; }
  CUKIT_DEVICE void draw(int* counter) { tile_ = atomicAdd(counter, 1); }

 private:
  int tile_ = static_cast<int>(blockIdx.x);
};

// One unit of work of a matrix product: a tile of the result, and the steps of k to sum up.
struct MatrixTile {
  int m, n;  // tiles before it along each axis
  int first_step, end_step;
};

// Walks over the tiles of a matrix in groups of `group` rows of tiles, column by column within a group:
// the tiles in flight at any time share few rows of a and few columns of b, which L2 then holds.
// `splits` neighbours in this order share a tile and split its steps of k.
struct MatrixTiles {
  int tiles_m, tiles_n;
  int group;
  int steps;  // of k
  int splits;

  CUKIT_DEVICE int count() const { return tiles_m * tiles_n * splits; }

  CUKIT_DEVICE MatrixTile at(int index) const {
    const int split = index % splits;
    const int tile = index / splits;
    const int per_group = group * tiles_n;
    const int first = tile / per_group * group;
    const int rows = min(group, tiles_m - first);
    const int within = tile % per_group;
    return {first + within % rows, within / rows, steps * split / splits,
            steps * (split + 1) / splits};
  }
};

// A unit of work of StreamKTiles: the tile and the block's steps of it.
struct StreamKTile {
  int m, n;
  int first_step, end_step;
  int shared;  // number among the tiles that blocks share, or -1
};

// The first `whole` tiles, a multiple of the blocks or all there are, go to one block each under the
// static schedule. The others' steps, laid end to end, are cut into one contiguous share a block: every
// block has the same work to within one step, and at most its first and its last piece are not whole
// tiles. Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
// Multiplication on the GPU". There are at least as many shared steps as blocks, or none,
// and their product is below 2^32.
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

  // ---- Tiles that several blocks have pieces of ----

  CUKIT_DEVICE bool in_pieces(const Tile& tile) const {
    return tile.end_step - tile.first_step < tiles.steps;
  }
  // The blocks from first_block to last_block have a piece of a shared tile each.
  CUKIT_DEVICE int first_block(int shared) const { return block_of(shared * tiles.steps); }
  CUKIT_DEVICE int last_block(int shared) const { return block_of((shared + 1) * tiles.steps - 1); }

  // A place for the piece of a shared tile that belongs to `block`: 0 .. 2 blocks - 1.
  CUKIT_DEVICE int place(int block, int shared) const {
    return 2 * block + (first_unit(block) / tiles.steps == shared ? 0 : 1);
  }

 private:
  CUKIT_DEVICE unsigned units() const { return (tiles.count() - whole) * tiles.steps; }

  // Where a block's share begins.
  CUKIT_DEVICE int first_unit(unsigned block) const { return units() * block / gridDim.x; }

  // The last block whose share begins at `unit` or before.
  CUKIT_DEVICE int block_of(unsigned unit) const { return ((unit + 1) * gridDim.x - 1) / units(); }
};

}  // namespace cukit
