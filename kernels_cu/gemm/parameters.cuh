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

// Products of groups of rows, each group with a matrix of its own (grouped_gemm_sm90).
struct GroupedParameters {
  int m, n;       // extents that all groups share; the ragged one is 0
  int steps;      // ceil(k / TILE_K), at least 1; 0 where k is ragged
  int group;      // rows of tiles that are walked over together
  int groups;
  int longest;    // no group has more rows: all rows there are, or those set aside for each group
  int set_aside;  // 1: group g has `longest` rows of its own; 0: groups lie one behind the other
};

}  // namespace cukit
