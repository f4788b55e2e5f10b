// Writes of several rows each to a memory: the same bits in whatever order they are given.
//
//   s = sum_w gates[w], u = sum_w gates[w] values[w] over the writes w to row i
//   memory[i] = (1 - s / c) memory[i] + u / c, c = max(1, s)
//
// Writes come sorted by row; those of a row in any order (gated_sum.cuh). Negative gates count as 0.
// Mapping: a warp a write; the first of its row does them all, VEC columns a lane. Shared memory: none.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS. Minimum architecture: sm_80. Computes in float.
// Reference: cukit/reference/graph_memory.py, memory_write.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "graph_memory/gated_sum.cuh"
#include "graph_memory/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) memory_write(
    const int* __restrict__ order,    // [num_writes], sorts indices
    const int* __restrict__ indices,  // [num_writes]
    const T* __restrict__ values,     // [num_writes, dim]
    const float* __restrict__ gates,  // [num_writes]
    T* __restrict__ memory,           // [num_rows, dim]
    float* __restrict__ totals,       // [num_rows], the sums of gates; zeros before
    const __grid_constant__ cukit::WriteParameters p) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int first = blockIdx.x * (THREADS / cukit::kWarpSize) + threadIdx.x / cukit::kWarpSize;
  if (first >= p.num_writes) return;
  const int row = indices[order[first]];
  if (row < 0 || row >= p.num_rows || (first > 0 && indices[order[first - 1]] == row)) return;
  int count = 1;
  while (first + count < p.num_writes && indices[order[first + count]] == row) ++count;

  const auto gate = [&](int i) {
    const float g = gates[order[first + i]];
    return g < 0.0f ? 0.0f : g;
  };
  const float total = cukit::sum_in_any_order(count, gate);
  const float scale = 1.0f / (total > 1.0f ? total : 1.0f);
  const float kept = total > 1.0f ? 0.0f : 1.0f - total;
  if (lane == 0) totals[row] = total;
  for (int column = lane * VEC; column < p.dim; column += cukit::kWarpSize * VEC) {
    T* at = memory + static_cast<long long>(row) * p.dim + column;
    cukit::Vec<T, VEC> old, rounded;
    float result[VEC];
    cukit::load(old, at);
    cukit::to_floats(result, old);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float sum = cukit::sum_in_any_order(count, [&](int i) {
        const long long write = order[first + i];
        return gate(i) * cukit::to_float(values[write * p.dim + column + j]);
      });
      // A row that is replaced as a whole loses what was there, NaN as well.
      result[j] = total >= 1.0f ? sum * scale : fmaf(kept, result[j], sum);
    }
    cukit::from_floats(rounded, result);
    cukit::store(at, rounded);
  }
}
