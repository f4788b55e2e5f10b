// The cost of strided loads: adjacent threads load words that are `stride` words apart.
//
//   sums[thread] = sum over i = thread, thread + threads, ... < count of words[i * stride]
//
// Kernels that read a column of a matrix, or one field of an array of structures, have this access
// pattern. The sum keeps the compiler from removing the loads.
//
// Mapping: a grid of any size; grid-stride loop over the words. Shared memory: none.
// Macros: WORDS 1|2|4, floats per word (loads of 4, 8 or 16 bytes); THREADS per block.
// Minimum architecture: sm_70. Reference: NumPy, words[::stride] summed by thread.
#include "common/platform.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) access_probe(
    const float* __restrict__ words,  // [count * stride, WORDS]
    float* __restrict__ sums,         // [gridDim.x * THREADS]
    long long count, int stride) {
  const long long threads = static_cast<long long>(gridDim.x) * THREADS;
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 8
  for (long long i = thread; i < count; i += threads) {
    cukit::Vec<float, WORDS> word;
    cukit::load(word, words + i * stride * WORDS);
    for (int j = 0; j < WORDS; ++j) sum += word[j];
  }
  sums[thread] = sum;
}
