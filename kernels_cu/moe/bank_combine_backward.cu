// Gradients of bank_combine.cu with respect to `hidden`, the outputs of the chosen layers, and
// partial sums of the gradients with respect to `weights`.
//
//   grad_hidden[rows[b, s], t] = weights[b, s] * grad[b, t] * f'(hidden[rows[b, s], t])
//   parts[b, s, part] = sum over the part of grad[b, t] * f(hidden[rows[b, s], t])
//   f: the activation.
//
// Mapping: grid (top_k, parts, batch): adjacent blocks read the same part of grad. Each thread has
//   kVecs vectors of VEC elements. Shared memory: one float per warp, static.
// Macros: DTYPE float32|float16|bfloat16; VEC; ACTIVATION as in bank_combine.cu; THREADS. Minimum
//   architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/layer_bank.py, layer_bank_backward.
#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"

namespace {

using T = cukit::element_t;
constexpr int kVecs = 4;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) bank_combine_backward(
    const T* __restrict__ grad,         // [batch, seq_len, dim]
    const T* __restrict__ hidden,       // [batch * top_k, seq_len, dim]
    const int* __restrict__ rows,       // [batch, top_k]
    const float* __restrict__ weights,  // [batch, top_k]
    T* __restrict__ grad_hidden,        // like hidden
    float* __restrict__ parts,          // [batch, top_k, parts]
    const __grid_constant__ cukit::BankParameters p) {
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  const long long size = static_cast<long long>(p.seq_len) * p.dim;
  const long long choice = static_cast<long long>(blockIdx.z) * p.top_k + blockIdx.x;
  const long long row = rows[choice] * size;
  const float weight = weights[choice];
  const T* own = grad + blockIdx.z * size;
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const long long at = ((static_cast<long long>(blockIdx.y) * kVecs + v) * THREADS + threadIdx.x) * VEC;
    if (at >= size) break;
    cukit::Vec<T, VEC> left, right, rounded;
    float g[VEC], h[VEC];
    cukit::load(left, own + at);
    cukit::load(right, hidden + row + at);
    cukit::to_floats(g, left);
    cukit::to_floats(h, right);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      float slope;
      const float value = cukit::activation_t<T>::value_and_slope(h[i], &slope);
      sum = fmaf(g[i], value, sum);
      h[i] = weight * g[i] * slope;
    }
    cukit::from_floats(rounded, h);
    cukit::store(grad_hidden + row + at, rounded);
  }
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch);
  if (threadIdx.x == 0) parts[choice * p.parts + blockIdx.y] = sum;
}
