// Copies 16-byte words: measures the bandwidth of device memory, reads and writes together.
//
//   to[i] = from[i]   for i < count
//
// Mapping: a block copies LOADS * THREADS consecutive words, and the grid covers all words; every
//   thread issues all of its loads before its first store. Shared memory: none.
// Macros: THREADS per block; LOADS, words per thread.
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
