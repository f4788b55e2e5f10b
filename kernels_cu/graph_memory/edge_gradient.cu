// Gradient of a diffusion step with respect to the values of the edges, accumulated over steps.
//
//   grad_values[e] = (FIRST ? 0 : grad_values[e]) + transition_weight * <grad[i], z[columns[e]]>
//
// for the edges e of each row i.
//
// Mapping: one warp per row; the lanes' partial sums of an edge are reduced in a fixed order.
//   Shared memory: none.
// Macros: DTYPE float32|float16|bfloat16; VEC; FIRST 0|1; THREADS. Minimum architecture: sm_80.
//   Accumulates in float; deterministic.
// Reference: cukit/reference/graph_memory.py, graph_diffusion_backward.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "graph_memory/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) edge_gradient(
    const int* __restrict__ offsets,   // [num_rows + 1]
    const int* __restrict__ columns,   // [edges]
    const T* __restrict__ grad,        // [num_rows, dim]
    const T* __restrict__ z,           // [num_rows, dim]
    float* __restrict__ grad_values,   // [edges]
    const __grid_constant__ cukit::DiffuseParameters p) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int row = blockIdx.x * (THREADS / cukit::kWarpSize) + threadIdx.x / cukit::kWarpSize;
  if (row >= p.num_rows) return;
  const T* own = grad + static_cast<long long>(row) * p.dim;
  const int end = offsets[row + 1];
#pragma unroll 2
  for (int e = offsets[row]; e < end; ++e) {
    const T* other = z + static_cast<long long>(columns[e]) * p.dim;
    float sum = 0.0f;
    for (int at = lane * VEC; at < p.dim; at += cukit::kWarpSize * VEC) {
      cukit::Vec<T, VEC> left, right;
      float a[VEC], b[VEC];
      cukit::load(left, own + at);
      cukit::load(right, other + at);
      cukit::to_floats(a, left);
      cukit::to_floats(b, right);
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum = fmaf(a[i], b[i], sum);
    }
    sum = cukit::warp_reduce<cukit::Sum>(sum);
    if (lane == 0) grad_values[e] = fmaf(p.transition_weight, sum, FIRST ? 0.0f : grad_values[e]);
  }
}
