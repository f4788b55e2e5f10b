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

// A product of 8-bit codes: 0 for a stride means one scale for all rows (of a) or columns (of b). Scales
// of blocks: a_stride is that between steps of k.
struct QuantizedParameters {
  LinearParameters linear;
  int a_stride, b_stride;
};

// Where operands lie that no tensor map describes.
struct RowStrides {
  long long a_row_bytes, b_row_bytes;
  int k;
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

// The same with tiles whose order is fixed (grouped_gemm_sm80): the ragged one of m and k is 0.
struct GroupedDenseParameters {
  int m, n, k;
  int groups, longest, set_aside;
};

// Block-sparse products: out [m, n], inner extent k, of which one matrix is sparse.
struct BsrParameters {
  int m, n, k;
  int groups;  // of block rows
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

// A product out [tokens, columns] = x [tokens, depth] w [depth, columns]; distances in elements.
struct GemvParameters {
  long long x_token, x_depth, w_leading, out_token, out_column;
  int tokens, columns, depth;
};

}  // namespace cukit
