// What the kernels of this family take by value.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Matrices [num_matrices, rows, cols], and their cut into blocks that share a scale.
//   storage_cols  bytes of a row of codes
//   block_*       rows and columns of a block; the last of a matrix may be smaller
//   blocks_*      blocks of a matrix along each axis
//   num_blocks    of all matrices
//   scale_*       elements from the scale of a block to that of the next matrix, row, column
struct BlockedMatrices {
  long long num_matrices, rows, cols, storage_cols;
  long long block_rows, block_cols;
  long long blocks_down, blocks_across, num_blocks;
  long long scale_matrix, scale_down, scale_across;
};

// Tensors [num_tensors, size] with a scale each. A grid has parts * num_tensors thread blocks.
//   code_bytes  of a tensor's codes
struct WholeTensors {
  long long size, code_bytes;
  int parts;
};

}  // namespace cukit
