// Parameter structs that the kernels of matrix products take by value.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts
// agree.
#pragma once

namespace cukit {

// A product out [m, n] = a [m, k] b [n, k]^T.
struct GemmParameters {
  int m, n;
  int steps;         // ceil(k / TILE_K), at least 1
  int raster_group;  // tile rows (with clusters, cluster rows) of a rasterisation group
};

// A product and the rows of the TMA boxes of its K-major operands.
struct LinearParameters {
  GemmParameters gemm;
  int box_a, box_b;
};

// A product whose first `rotated` columns are rotated (RoPE), with tables of `period` rows.
struct RotatedParameters {
  GemmParameters gemm;
  int period, rotated;
};

// A product for a kernel whose rasterisation is fixed (linear_sm80).
struct DenseParameters {
  int m, n, k;
};

// A gradient [rows, columns], in strips of `strip_rows` rows.
struct GradientParameters {
  int rows, columns;
  int strip_rows;
};

// A product of 8-bit codes. A stride of 0 means one scale for all rows (of a) or columns (of b).
// With scales per block, a_stride is the stride between k steps.
struct QuantizedParameters {
  LinearParameters linear;
  int a_stride, b_stride;
};

// Strides of operands that are read without tensor maps.
struct RowStrides {
  long long a_row_bytes, b_row_bytes;
  int k;
};

// Grouped products: each group of rows has its own matrix (grouped_gemm_sm90, grouped_fp8_sm90).
struct GroupedParameters {
  int m, n;            // extents that all groups share; 0 for the one that differs between groups
  int steps;           // ceil(k / TILE_K), at least 1; 0 if k differs between groups
  int raster_group;    // tile rows of a rasterisation group
  int groups;
  int longest;         // upper bound of a group's rows: the capacity, or the total number of rows
  int fixed_capacity;  // 1: each group has a capacity of `longest` rows; 0: groups are contiguous
};

// Grouped products for a kernel whose rasterisation is fixed (grouped_gemm_sm80). m or k is 0 if it
// differs between groups.
struct GroupedDenseParameters {
  int m, n, k;
  int groups, longest, fixed_capacity;
};

// Block-sparse products: out [m, n], inner extent k; one of the three matrices is sparse.
struct BsrParameters {
  int m, n, k;
  int groups;  // of block rows
};

// A product of activations x [tokens, k] with a packed weight [rows, k]: out [tokens, rows].
struct WeightOnlyParameters {
  int tokens, rows;
  int columns;       // row length of x: k rounded up to a multiple of 8; unused with tensor maps
  int steps;         // blocks of the weight along k, at least 1
  int raster_group;  // tile rows of a rasterisation group
  int token_stride;  // of the scales of a float8 x: 0 if all tokens share one
  // Number of tiles that are not split along k (stream-K); with SPLITS > 1, the number of blocks.
  int whole_tiles;
};

// A product out [tokens, columns] = x [tokens, depth] w [depth, columns]; strides in elements.
struct GemvParameters {
  long long x_token, x_depth, w_leading, out_token, out_column;
  int tokens, columns, depth;
};

}  // namespace cukit
