// Gated writes to the rows of a memory, bitwise independent of the order of the writes.
//
//   s = sum_w gates[w], u = sum_w gates[w] values[w] over the writes w to row i
//   out[i] = (1 - s / c) memory[i] + u / c, c = max(1, s)
//
// The writes to a row are a linked list in any order (link_writes.cu); the sums do not depend on
// the order (reproducible_sums.cuh). Negative gates are treated as 0.
// Mapping: one warp per row, VEC columns per lane; rows without writes are copied. Shared memory:
//   none.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS. Minimum architecture: sm_80. Computes in
//   float.
// Reference: cukit/reference/graph_memory.py, memory_write.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "graph_memory/reproducible_sums.cuh"
#include "graph_memory/parameters.cuh"

namespace {

using T = cukit::element_t;
using Part = cukit::Vec<T, VEC>;

CUKIT_DEVICE float clamped_gate(float gate) { return gate < 0.0f ? 0.0f : gate; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) memory_write(
    const int* __restrict__ heads,    // [num_rows], the first write to each row or -1
    const int* __restrict__ next,     // [num_writes], the next write to the same row or -1
    const T* __restrict__ values,     // [num_writes, dim]
    const float* __restrict__ gates,  // [num_writes]
    const T* memory,                  // [num_rows, dim]
    T* out,                           // [num_rows, dim]; may be the memory
    float* __restrict__ totals,       // [num_rows], the sums of gates
    const __grid_constant__ cukit::WriteParameters p) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int row = blockIdx.x * (THREADS / cukit::kWarpSize) + threadIdx.x / cukit::kWarpSize;
  if (row >= p.num_rows) return;
  const int head = heads[row];
  const long long from = static_cast<long long>(row) * p.dim;

  int count = 0;
  float total = 0.0f;
  cukit::ReproducibleSums<1> sum;
  for (int write = head; write >= 0; write = next[write]) {
    total = clamped_gate(gates[write]);
    sum.observe(0, total);
    ++count;
  }
  if (count > 1) {
    sum.scale(count);
    for (int write = head; write >= 0; write = next[write]) sum.add(0, clamped_gate(gates[write]));
    total = sum.result(0);
  }
  if (lane == 0) totals[row] = total;
  if (count == 0 && out == memory) return;

  // The result of a replaced row does not depend on its old values, which may be NaN.
  const bool replaced = total >= 1.0f;
  const float scale = replaced ? 1.0f / total : 1.0f;
#pragma unroll 1
  for (int column = lane * VEC; column < p.dim; column += cukit::kWarpSize * VEC) {
    Part held;
    cukit::load(held, memory + from + column);
    if (count > 0) {
      float old[VEC], part[VEC], written[VEC];
      cukit::to_floats(old, held);
      cukit::ReproducibleSums<VEC> sums;
      for (int write = head; write >= 0; write = next[write]) {
        const float gate = clamped_gate(gates[write]);
        cukit::load(held, values + static_cast<long long>(write) * p.dim + column);
        cukit::to_floats(part, held);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          written[i] = gate * part[i];
          sums.observe(i, written[i]);
        }
      }
      if (count > 1) {
        sums.scale(count);
        for (int write = head; write >= 0; write = next[write]) {
          const float gate = clamped_gate(gates[write]);
          cukit::load(held, values + static_cast<long long>(write) * p.dim + column);
          cukit::to_floats(part, held);
#pragma unroll
          for (int i = 0; i < VEC; ++i) sums.add(i, gate * part[i]);
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) written[i] = sums.result(i);
      }
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        old[i] = replaced ? written[i] * scale : fmaf(1.0f - total, old[i], written[i]);
      }
      cukit::from_floats(held, old);
    }
    cukit::store(out + from + column, held);
  }
}
