// Mixture of depths: gradients of depth_combine for the block's outputs y and for the weights.
//
//   grad_y[b, i] = weight * grad_out[b, indices[b, i]]        grad_weight = sum(y * grad_out)
//
// Both gradients are NaN for an index outside the sequence.
//
// Mapping: one thread block per row of y. Shared memory: THREADS / 32 floats, static.
// Macros: DTYPE float32|float16|bfloat16; VEC elements per access; THREADS.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/depth.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) depth_combine_backward(
    const cukit::element_t* __restrict__ grad_out,  // [batch, seq_len, hidden]
    const cukit::element_t* __restrict__ y,         // [batch, capacity, hidden]
    const float* __restrict__ weights,              // [batch, capacity]
    const int* __restrict__ indices,                // [batch, capacity]
    cukit::element_t* __restrict__ grad_y,          // [batch, capacity, hidden]
    float* __restrict__ grad_weights,               // [batch, capacity]
    int seq_len, int capacity, int hidden) {        // hidden: a multiple of VEC
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  const long long row = blockIdx.x;
  const float weight = weights[row];
  const int index = indices[row];
  const bool inside = index >= 0 && index < seq_len;
  grad_out += (row / capacity * seq_len + index) * hidden;
  float sum = 0.0f;
  for (int i = threadIdx.x * VEC; i < hidden; i += THREADS * VEC) {
    cukit::Vec<cukit::element_t, VEC> grads, values;
    cukit::load(values, y + row * hidden + i);
    float grad[VEC], value[VEC];
    if (inside) {
      cukit::load(grads, grad_out + i);
      cukit::to_floats(grad, grads);
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j) grad[j] = __int_as_float(0x7fffffff);
    }
    cukit::to_floats(value, values);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      sum += grad[j] * value[j];
      grad[j] *= weight;
    }
    cukit::from_floats(grads, grad);
    cukit::store(grad_y + row * hidden + i, grads);
  }
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch);
  if (threadIdx.x == 0) grad_weights[row] = sum;
}
