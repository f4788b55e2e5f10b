// The auxiliary losses of a router.
//
//   balance_loss = num_experts * sum_e share[e] * mean_t probability[t, e]
//   z_loss       = mean_t log_sum_exp(logits[t])^2
//
// share[e] is the fraction of all choices that selected e. Sums over tokens are given as partial
// sums, rows of num_experts + 1 floats: the probabilities, then the squared log-sum-exps.
//
// Papers: Fedus et al., "Switch Transformers", arXiv:2101.03961; Zoph et al., "ST-MoE",
// arXiv:2202.08906. Macros: THREADS.
#pragma once

#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "moe/parameters.cuh"

namespace cukit {

// Computes losses[2] from counts[num_experts] in shared memory and sums[parts, num_experts + 1].
// Called by all threads of one block; `scratch` has THREADS / 32 floats. Adds in a fixed order.
CUKIT_DEVICE void write_losses(float* losses, const int* counts, const float* sums, int parts,
                               const RoutingParameters& p, float* scratch) {
  const int columns = p.num_experts + 1;
  float balance = 0.0f, z = 0.0f;
  // Parts are divided over warps and columns over lanes, so that many loads are in flight at once.
  const int lane = threadIdx.x % kWarpSize;
  for (int column = lane; column < columns; column += kWarpSize) {
    float sum = 0.0f;
#pragma unroll 8
    for (int part = threadIdx.x / kWarpSize; part < parts; part += THREADS / kWarpSize) {
      sum += sums[part * columns + column];
    }
    if (column < p.num_experts) {
      balance += sum * counts[column];
    } else {
      z += sum;
    }
  }
  balance = block_reduce<Sum, THREADS>(balance, scratch);
  z = block_reduce<Sum, THREADS>(z, scratch);
  if (threadIdx.x == 0) {
    const float tokens = max(p.num_tokens, 1);
    losses[0] = balance * p.num_experts / (tokens * tokens * p.top_k);
    losses[1] = z / tokens;
  }
}

}  // namespace cukit
