// Float32 scratch in which thread blocks accumulate the gradient of the queries.
//
// It holds scratch rows (scratch_rows.cuh) of HEAD_DIM as 16x8 blocks in row-major order. A 16x8
// block stores the four mma.sync accumulators of each lane so that a warp's accesses are coalesced:
// lane by lane from sm_90 on, otherwise accumulator by accumulator.
//
// With TRANSPOSED (flash_attention_backward_rows.cu) a tile of TILE_M rows holds the 16x8 blocks of
// its transpose, [HEAD_DIM, TILE_M].
#pragma once

#include "common/platform.cuh"
#include "common/ptx/reduce_add.cuh"

namespace cukit {

constexpr int kQueryBlock = 16 * 8;  // floats

// Offset, in floats, of the block at row `row` (a multiple of 16) and column `column` (of 8).
template <int HeadDim>
CUKIT_DEVICE long long query_block(long long row, int column) {
  return (row / 16 * (HeadDim / 8) + column / 8) * kQueryBlock;
}

// Adds this lane's accumulators to a block, atomically: thread blocks may add concurrently.
CUKIT_DEVICE void add_to_query_block(float* block, int lane, const float (&acc)[4]) {
#if __CUDA_ARCH__ >= 900
  reduce_add_x4(block + lane * 4, acc);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(block + i * kWarpSize + lane, acc[i]);
#endif
}

// Reads this lane's accumulators as add_to_query_block stored them.
CUKIT_DEVICE void read_query_block(float (&acc)[4], const float* block, int lane) {
#if __CUDA_ARCH__ >= 900
  const float4 four = *reinterpret_cast<const float4*>(block + lane * 4);
  acc[0] = four.x, acc[1] = four.y, acc[2] = four.z, acc[3] = four.w;
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = block[i * kWarpSize + lane];
#endif
}

}  // namespace cukit
