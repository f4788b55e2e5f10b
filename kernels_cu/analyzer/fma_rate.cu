// Float32 multiply-adds and little else: measures the throughput of the FP32 units, in a time that
// depends on `rounds` alone.
//
//   CHAINS times: x = thread / 1024 + chain, then 8 * rounds times: x = x * scale + shift
//   out[thread] = sum of the chains
//
// Mapping: a thread runs CHAINS independent chains, more than are needed to hide the latency of a
//   multiply-add. Shared memory: none.
// Macros: THREADS per block; CHAINS.
// Minimum architecture: sm_70. Reference: the recurrence in NumPy.
#include "common/platform.cuh"

constexpr int kUnroll = 8;

extern "C" __global__ void __launch_bounds__(THREADS) fma_rate(
    float* __restrict__ out,  // [gridDim.x * THREADS]
    float scale, float shift, int rounds) {
  const int thread = blockIdx.x * THREADS + threadIdx.x;
  float x[CHAINS];
#pragma unroll
  for (int j = 0; j < CHAINS; ++j) x[j] = thread * (1.0f / 1024.0f) + j;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
#pragma unroll
      for (int j = 0; j < CHAINS; ++j) x[j] = fmaf(x[j], scale, shift);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < CHAINS; ++j) sum += x[j];
  out[thread] = sum;
}
