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

// A product out [tokens, columns] = x [tokens, depth] w [depth, columns]; distances in elements.
struct GemvParameters {
  long long x_token, x_depth, w_leading, out_token, out_column;
  int tokens, columns, depth;
};

}  // namespace cukit
