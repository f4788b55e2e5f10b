// Parameter structs that the quantisation kernels take by value.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Matrices [num_matrices, rows, cols], divided into blocks that share a scale.
//   storage_cols  bytes per row of codes
//   block_*       rows and columns of a block; the last blocks of a matrix may be smaller
//   blocks_*      blocks of a matrix along each axis
//   num_blocks    blocks of all matrices
//   scale_*       strides of the scales in elements, along matrices, block rows and block columns
struct BlockedMatrices {
  long long num_matrices, rows, cols, storage_cols;
  long long block_rows, block_cols;
  long long blocks_down, blocks_across, num_blocks;
  long long scale_matrix, scale_down, scale_across;
};

// Tensors [num_tensors, size] with one scale each. A grid has parts * num_tensors thread blocks.
//   code_bytes  bytes of a tensor's codes
struct WholeTensors {
  long long size, code_bytes;
  int parts;
};

}  // namespace cukit
