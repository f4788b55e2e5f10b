// Copies words of 16 bytes: what device memory can do, both ways at once.
//
//   to[i] = from[i]   for i < count
//
// Mapping: a block copies a run of LOADS * THREADS words, and the grid covers them all; every
//   thread has all of its loads in flight before its first store. Shared memory: none.
// Macros: THREADS of a block; LOADS, words a thread.
// Minimum architecture: sm_80. Reference: NumPy's copy.
#include "common/platform.cuh"
#include "common/types.cuh"

using Word = cukit::Vec<float, 4>;

extern "C" __global__ void __launch_bounds__(THREADS) copy(
    const float* __restrict__ from,  // [count, 4]
    float* __restrict__ to,          // [count, 4]
    long long count) {
  const long long first = static_cast<long long>(blockIdx.x) * LOADS * THREADS + threadIdx.x;
  Word words[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; ++j) {
    const long long i = first + j * THREADS;
    if (i < count) cukit::load<cukit::Cache::Kept>(words[j], from + 4 * i);
  }
#pragma unroll
  for (int j = 0; j < LOADS; ++j) {
    const long long i = first + j * THREADS;
    if (i < count) cukit::store(to + 4 * i, words[j]);
  }
}
