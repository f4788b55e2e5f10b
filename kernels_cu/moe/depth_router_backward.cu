// Mixture of depths: the gradient of the router's logits.
//
//   grad_logits = grad_weight * weight * (1 - weight) if the slot is in [0, capacity), else 0
//
// Mapping: one thread per token. No shared memory.
// Macros: DTYPE float32|float16|bfloat16, of grad_logits; THREADS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/depth.py.
#include "common/platform.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) depth_router_backward(
    const float* __restrict__ grad_weights,       // [batch, capacity]
    const float* __restrict__ weights,            // [batch, capacity]
    const int* __restrict__ slots,                // [batch, seq_len]
    cukit::element_t* __restrict__ grad_logits,   // [batch, seq_len]
    long long tokens, int seq_len, int capacity) {
  const long long token = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (token >= tokens) return;
  const int slot = slots[token];
  float grad = 0.0f;
  if (slot >= 0 && slot < capacity) {
    const long long at = token / seq_len * capacity + slot;
    grad = grad_weights[at] * weights[at] * (1.0f - weights[at]);
  }
  grad_logits[token] = cukit::from_float<cukit::element_t>(grad);
}
