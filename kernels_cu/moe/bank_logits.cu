// The mean token of each sample, and its dot products with the rows of the router.
//
//   means[b] = sum_part sums[b, part] / seq_len      logits[b, l] = <means[b], router[l]>
//
// Mapping: one block per sample; one warp per layer. Shared memory: dim * 4 bytes, dynamic.
// Macros: THREADS. Minimum architecture: sm_80. Accumulates in float in a fixed order:
//   deterministic.
// Reference: cukit/reference/layer_bank.py, layer_bank.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "moe/parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) bank_logits(
    const float* __restrict__ sums,    // [batch, parts, dim]
    const float* __restrict__ router,  // [num_layers, dim]
    float* __restrict__ means,         // [batch, dim]
    float* __restrict__ logits,        // [batch, num_layers]
    const __grid_constant__ cukit::BankParameters p) {
  CUKIT_DYNAMIC_SHARED(float, mean);
  const long long sample = blockIdx.x;
  const float scale = 1.0f / static_cast<float>(p.seq_len);
  for (int c = threadIdx.x; c < p.dim; c += THREADS) {
    float sum = 0.0f;
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) sum += sums[(sample * p.parts + part) * p.dim + c];
    mean[c] = sum * scale;
    means[sample * p.dim + c] = sum * scale;
  }
  __syncthreads();
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (int l = threadIdx.x / cukit::kWarpSize; l < p.num_layers; l += THREADS / cukit::kWarpSize) {
    const float* row = router + static_cast<long long>(l) * p.dim;
    float sum = 0.0f;
#pragma unroll 4
    for (int c = lane; c < p.dim; c += cukit::kWarpSize) sum = fmaf(mean[c], row[c], sum);
    sum = cukit::warp_reduce<cukit::Sum>(sum);
    if (lane == 0) logits[sample * p.num_layers + l] = sum;
  }
}
