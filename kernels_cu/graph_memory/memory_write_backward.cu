// Gradients of memory_write.cu with respect to the old memory and to the values and gate of each
// write.
//
//   s < 1:  grad_memory[i] = (1 - s) grad[i]    grad_gates[w] = <grad[i], values[w] - memory[i]>
//   else:   grad_memory[i] = 0                  grad_gates[w] = <grad[i], values[w] - out[i]> / s
//   grad_values[w] = gates[w] / max(1, s) * grad[i]
//
// for each write w to row i, where s = totals[i] is the sum of the gates of these writes. Negative
// gates are treated as 0 and have no gradient.
//
// Mapping: one warp per row of the memory, followed by one warp per write. Shared memory: none.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS. Minimum architecture: sm_80. Accumulates in
//   float; deterministic.
// Reference: cukit/reference/graph_memory.py, memory_write_backward.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "graph_memory/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) memory_write_backward(
    const T* __restrict__ grad,        // [num_rows, dim]
    const T* __restrict__ memory,      // [num_rows, dim], before the writes
    const T* __restrict__ out,         // [num_rows, dim], after the writes
    const int* __restrict__ indices,   // [num_writes]
    const T* __restrict__ values,      // [num_writes, dim]
    const float* __restrict__ gates,   // [num_writes]
    const float* __restrict__ totals,  // [num_rows]
    T* __restrict__ grad_memory,       // [num_rows, dim]
    T* __restrict__ grad_values,       // [num_writes, dim]
    float* __restrict__ grad_gates,    // [num_writes]
    const __grid_constant__ cukit::WriteParameters p) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int item = blockIdx.x * (THREADS / cukit::kWarpSize) + threadIdx.x / cukit::kWarpSize;
  if (item >= p.num_rows + p.num_writes) return;
  const bool is_row = item < p.num_rows;
  const int write = item - p.num_rows;
  const int row = is_row ? item : indices[write];
  const bool exists = row >= 0 && row < p.num_rows;
  const float total = exists ? totals[row] : 0.0f;
  const bool replaced = total >= 1.0f;
  const float scale = replaced ? 1.0f / total : 1.0f;
  const float gate = is_row || !exists ? 0.0f : gates[write];
  const float factor = is_row ? (replaced ? 0.0f : 1.0f - total) : (gate < 0.0f ? 0.0f : gate) * scale;
  const long long from = static_cast<long long>(exists ? row : 0) * p.dim;
  const long long own = static_cast<long long>(write) * p.dim;
  const T* base = (replaced ? out : memory) + from;
  float sum = 0.0f;
  for (int column = lane * VEC; column < p.dim; column += cukit::kWarpSize * VEC) {
    cukit::Vec<T, VEC> loaded, rounded;
    float g[VEC] = {}, result[VEC];
    if (exists) {
      cukit::load(loaded, grad + from + column);
      cukit::to_floats(g, loaded);
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) result[j] = factor * g[j];
    if (!is_row && exists) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float change = cukit::to_float(values[own + column + j]) - cukit::to_float(base[column + j]);
        sum = fmaf(g[j], change, sum);
      }
    }
    cukit::from_floats(rounded, result);
    cukit::store((is_row ? grad_memory + from : grad_values + own) + column, rounded);
  }
  sum = cukit::warp_reduce<cukit::Sum>(sum);
  if (!is_row && lane == 0) grad_gates[write] = gate < 0.0f ? 0.0f : sum * scale;
}
