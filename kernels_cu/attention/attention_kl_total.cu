// Weighted sum of the divergences of rows, in a fixed order.
//
// attention_kl_sum:    block b sums weight * row, and the weights, over its share of the rows:
//                      partials[0][b], partials[1][b].
// attention_kl_total:  one block adds the partial sums and computes
//                      totals = (factor * sum of rows / N, factor * *grad / N),
//                      where N is *normalizer; if that is null, with WEIGHED the sum of the
//                      queries' weights (1 if it is 0), otherwise 1.
//
// A query has the same weight in all heads. A row of weight 0 adds 0 even if it is infinite.
// Macros: THREADS multiple of 32, 32..1024; WEIGHED 0|1: N is the sum of the weights.
// Minimum architecture: sm_80. Float accumulation, deterministic.
// Reference: cukit/reference/attention_kl.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attention_kl_sum(
    const float* __restrict__ rows,     // [batch, heads, seq], or null
    const float* __restrict__ weights,  // [batch, seq], or null: 1
    float* __restrict__ partials,       // [2, blocks]
    long long count, int heads, long long seq) {
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  float sum = 0.0f, weight_sum = 0.0f;
  const long long share = (count + gridDim.x - 1) / gridDim.x;
  const long long first = blockIdx.x * share;
  const long long end = first + share < count ? first + share : count;
  for (long long at = first + threadIdx.x; at < end; at += THREADS) {
    float weight = 1.0f;
    if (weights != nullptr) weight = weights[at / (heads * seq) * seq + at % seq];
    weight_sum += weight;
    if (rows != nullptr && weight != 0.0f) sum = fmaf(weight, rows[at], sum);
  }
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch);
  weight_sum = cukit::block_reduce<cukit::Sum, THREADS>(weight_sum, scratch);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
    partials[gridDim.x + blockIdx.x] = weight_sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_kl_total(
    const float* __restrict__ partials,    // [2, blocks]
    const float* __restrict__ normalizer,  // scalar or null
    const float* __restrict__ grad,        // scalar or null: 1
    float* __restrict__ totals,            // [2]
    int blocks, float factor, int heads) {
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  float sum = 0.0f, weight_sum = 0.0f;
  for (int block = threadIdx.x; block < blocks; block += THREADS) {
    sum += partials[block];
    weight_sum += partials[blocks + block];
  }
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch);
  weight_sum = cukit::block_reduce<cukit::Sum, THREADS>(weight_sum, scratch);
  if (threadIdx.x == 0) {
    float divisor = 1.0f;
    if (normalizer != nullptr) {
      divisor = *normalizer;
    } else if (WEIGHED && weight_sum != 0.0f) {
      divisor = weight_sum / static_cast<float>(heads);
    }
    totals[0] = sum * factor / divisor;
    totals[1] = (grad != nullptr ? *grad : 1.0f) * factor / divisor;
  }
}
