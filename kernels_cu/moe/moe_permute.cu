// Copies each token's row to the rows of its experts.
//
//   y[rows[t, s]] = x[t] for every choice s with rows[t, s] >= 0
//
// Mapping: block (token, slice) reads THREADS * VECS_PER_THREAD accesses of a row once and writes
//   them top_k times. No shared memory. Macros: ACCESS_BYTES 1|2|4|8|16; THREADS; VECS_PER_THREAD.
// Minimum architecture: sm_80. Copies are exact. Reference: cukit/reference/moe.py, moe_permute.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"

using Access = cukit::Vec<unsigned char, ACCESS_BYTES>;

extern "C" __global__ void __launch_bounds__(THREADS) moe_permute(
    const unsigned char* __restrict__ x,  // [num_tokens, vecs] accesses
    const int* __restrict__ rows,         // [num_tokens, top_k]
    unsigned char* __restrict__ y,        // [num_rows, vecs] accesses
    const __grid_constant__ cukit::PermuteParameters p) {
  const int token = blockIdx.x;
  const int first = blockIdx.y * (THREADS * VECS_PER_THREAD) + threadIdx.x;
  const long long row_bytes = static_cast<long long>(p.vecs) * ACCESS_BYTES;
  Access held[VECS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int vec = first + i * THREADS;
    if (vec < p.vecs) cukit::load(held[i], x + token * row_bytes + vec * ACCESS_BYTES);
  }
#pragma unroll 4
  for (int slot = 0; slot < p.top_k; ++slot) {
    const int row = rows[static_cast<long long>(token) * p.top_k + slot];
    if (row < 0) continue;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = first + i * THREADS;
      if (vec < p.vecs) cukit::store(y + row * row_bytes + vec * ACCESS_BYTES, held[i]);
    }
  }
}
