// What the kernels of matrix products take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// A product out [m, n] = a [m, k] b [n, k]^T.
struct GemmParameters {
  int m, n;
  int steps;  // ceil(k / TILE_K), at least 1
  int group;  // rows of tiles (with clusters: of clusters) that are walked over together
};

// A product of activations x [tokens, k] with a packed weight [rows, k]: out [tokens, rows].
struct WeightOnlyParameters {
  int tokens, rows;
  int columns;      // k, rounded up to whole rows of 16 bytes
  int steps;        // blocks of the weight along k, at least 1
  int group;        // rows of tiles that are walked over together
  int token_stride;  // of the scales of x, of float8: 0 where one serves all tokens
  int whole_tiles;  // tiles that one block computes alone; all blocks share the steps of the others
};

}  // namespace cukit
