// First step of a radix sort pass over token ids: histogram of the digits of each chunk.
//
//   counts[chunk, digit] = number of keys of the chunk with that digit
//
// Mapping: one block per chunk of CHUNK keys. Shared memory: 4 * 2^DIGIT_BITS bytes, static.
// Macros: layers/radix.cuh, and ID int32|int64|uint32, the type of `keys` (uint32 after the first
//   pass). Minimum architecture: sm_80. Integer counts: deterministic. Reference: numpy.bincount.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "layers/radix.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) count_digits(
    const cukit::id_t* __restrict__ keys,  // [num_tokens]
    int* __restrict__ counts,              // [gridDim.x, kBins]
    int num_tokens, int num_keys) {
  __shared__ int bins[cukit::kBins];
  for (int bin = threadIdx.x; bin < cukit::kBins; bin += THREADS) bins[bin] = 0;
  __syncthreads();
  const int begin = blockIdx.x * CHUNK;
#pragma unroll 4
  for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
    if (begin + i < num_tokens) {
      atomicAdd(&bins[cukit::digit_of(cukit::id_key(keys[begin + i], num_keys))], 1);
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < cukit::kBins; bin += THREADS) {
    counts[static_cast<long long>(blockIdx.x) * cukit::kBins + bin] = bins[bin];
  }
}
