// Gradients of moe_unpermute with respect to y and the weights, in one pass.
//
//   grad_y[rows[t, s]] = weights[t, s] * grad_out[t]
//   grad_weights[t, s] = grad_out[t] . y[rows[t, s]]
//
// A choice with rows[t, s] < 0 has no row in grad_y, and its gradient in grad_weights is 0.
// Mapping: one warp per choice (t, s), THREADS / 32 choices per block: adjacent choices share a
//   token, whose grad_out hits L1. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; VEC elements per access; THREADS; VECS_PER_THREAD
//   accesses of each tensor in flight. Minimum architecture: sm_80. Accumulates in float in a fixed
//   order: deterministic.
// Reference: cukit/reference/moe.py, moe_unpermute_backward.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

extern "C" __global__ void __launch_bounds__(THREADS) moe_unpermute_backward(
    const T* __restrict__ grad_out,      // [num_tokens, hidden]
    const T* __restrict__ y,             // [num_rows, hidden]
    const int* __restrict__ rows,        // [num_tokens, top_k]
    const float* __restrict__ weights,   // [num_tokens, top_k]
    T* __restrict__ grad_y,              // [num_rows, hidden]
    float* __restrict__ grad_weights,    // [num_tokens, top_k]
    const __grid_constant__ cukit::PermuteParameters p) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const long long choice = static_cast<long long>(blockIdx.x) * (THREADS / cukit::kWarpSize) +
                           threadIdx.x / cukit::kWarpSize;
  if (choice >= static_cast<long long>(p.num_tokens) * p.top_k) return;
  const long long hidden = static_cast<long long>(p.vecs) * VEC;
  const int row = rows[choice];
  float dot = 0.0f;
  if (row >= 0) {
    const float weight = weights[choice];
    const T* const grad_row = grad_out + choice / p.top_k * hidden;
    for (int base = lane; base < p.vecs; base += VECS_PER_THREAD * cukit::kWarpSize) {
      Vector grad[VECS_PER_THREAD], value[VECS_PER_THREAD];
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int vec = base + i * cukit::kWarpSize;
        if (vec >= p.vecs) continue;
        cukit::load(value[i], y + row * hidden + vec * VEC);
        cukit::load(grad[i], grad_row + vec * VEC);
      }
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int vec = base + i * cukit::kWarpSize;
        if (vec >= p.vecs) continue;
        float grads[VEC], values[VEC];
        cukit::to_floats(grads, grad[i]);
        cukit::to_floats(values, value[i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          dot = fmaf(grads[j], values[j], dot);
          grads[j] *= weight;
        }
        cukit::from_floats(grad[i], grads);
        cukit::store(grad_y + row * hidden + vec * VEC, grad[i]);
      }
    }
    dot = cukit::warp_reduce<cukit::Sum>(dot);
  }
  if (lane == 0) grad_weights[choice] = dot;
}
