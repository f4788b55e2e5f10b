// Tile schedulers: which tiles of a result the blocks of a persistent grid compute, and in which order.
//
//   static   block b of g takes tiles b, b + g, ...: every warp knows them without communication.
//   dynamic  a counter in global memory deals tiles to whoever is free: for tiles of unlike cost. One
//            thread of a block draws, and passes the tile on with the first stage that it fills.
//   matrix   tiles of a matrix product in an order that keeps operands in L2, optionally with the
//            steps of k split among several.
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

}  // namespace cukit
