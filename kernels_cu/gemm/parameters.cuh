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

// Block-sparse products: out [m, n], inner extent k, of which one matrix is sparse.
struct BsrParameters {
  int m, n, k;
  int groups;  // of block rows
};

// The same, with the boxes in which TMA loads K-major operands.
struct LinearParameters {
  GemmParameters gemm;
  int box_a, box_b;
};

// The same where tiles and their order are fixed.
struct DenseParameters {
  int m, n, k;
};

// Rows of a gradient, in strips of `strip_rows`.
struct GradientParameters {
  int rows, columns;
  int strip_rows;
};

}  // namespace cukit
