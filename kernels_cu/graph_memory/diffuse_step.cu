// One step of a diffusion over a sparse graph.
//
//   out[i] = transition_weight * sum_e values[e] z[columns[e]] + memory_weight * memory[i]
//
// e: the edges of row i.
//
// Memory-bound by gathering rows of z. Columns are independent, so the launcher runs all steps on a
// slice of columns before the next slice: the gathered rows of a slice stay in L2.
//
// Mapping: LANES threads per row, VEC columns each; THREADS / LANES rows per block; grid (rows,
//   slices of LANES * VEC columns). Each lane loads an edge and broadcasts it by shuffles; eight
//   gathers are in flight. Sums are accumulated in float in the order of the edges: bitwise
//   independent of the slices.
// Shared memory: none. Macros: DTYPE float32|float16|bfloat16; VEC 1..8; LANES 8|16|32; ADD_MEMORY
//   0|1: add memory_weight * memory; THREADS. Minimum architecture: sm_80. Deterministic.
// Reference: cukit/reference/graph_memory.py, graph_diffusion.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/types.cuh"
#include "graph_memory/parameters.cuh"

namespace {

using T = cukit::element_t;
using Part = cukit::Vec<T, VEC>;

constexpr int kAhead = 8;  // gathers in flight
static_assert(LANES % kAhead == 0, "full batches of edges");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) diffuse_step(
    const int* __restrict__ offsets,  // [num_rows + 1]
    const int* __restrict__ columns,  // [edges]
    const float* __restrict__ values,  // [edges]
    const T* z,                       // [num_rows, dim]
    const T* __restrict__ memory,     // [num_rows, dim], ADD_MEMORY 1
    T* __restrict__ out,              // [num_rows, dim]
    const __grid_constant__ cukit::DiffuseParameters p) {
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  const int column = p.first + (blockIdx.y * LANES + lane) * VEC;
  const bool active = row < p.num_rows && column < p.dim;
  const int begin = row < p.num_rows ? offsets[row] : 0;
  const int degree = row < p.num_rows ? offsets[row + 1] - begin : 0;
  int longest = degree;  // largest degree among this warp's rows
#pragma unroll
  for (int distance = LANES; distance < cukit::kWarpSize; distance *= 2) {
    longest = max(longest, __shfl_xor_sync(cukit::kFullMask, longest, distance));
  }
  int next_column = lane < degree ? columns[begin + lane] : 0;
  float next_value = lane < degree ? values[begin + lane] : 0.0f;
  cukit::wait_for_previous_grids();
  cukit::release_next_grid();  // the next step loads its first edges while the last blocks finish

  const T* from = z + column;
  float sum[VEC] = {};
#pragma unroll 1
  for (int base = 0; base < longest; base += LANES) {
    const int own_column = next_column;
    const float own_value = next_value;
    const int ahead = base + LANES + lane;
    if (ahead < degree) {
      next_column = columns[begin + ahead];
      next_value = values[begin + ahead];
    }
#pragma unroll
    for (int batch = 0; batch < LANES; batch += kAhead) {
      if (base + batch >= longest) break;
      Part gathered[kAhead];
      float weights[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int from_row = __shfl_sync(cukit::kFullMask, own_column, batch + j, LANES);
        weights[j] = __shfl_sync(cukit::kFullMask, own_value, batch + j, LANES);
        if (active && base + batch + j < degree) {
          cukit::load(gathered[j], from + static_cast<long long>(from_row) * p.dim);
        }
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (active && base + batch + j < degree) {
          float part[VEC];
          cukit::to_floats(part, gathered[j]);
#pragma unroll
          for (int i = 0; i < VEC; ++i) sum[i] = fmaf(weights[j], part[i], sum[i]);
        }
      }
    }
  }
  if (active) {
    const long long place = static_cast<long long>(row) * p.dim + column;
    float result[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) result[i] = p.transition_weight * sum[i];
    if constexpr (ADD_MEMORY) {
      Part own;
      float part[VEC];
      cukit::load(own, memory + place);
      cukit::to_floats(part, own);
#pragma unroll
      for (int i = 0; i < VEC; ++i) result[i] = fmaf(p.memory_weight, part[i], result[i]);
    }
    Part rounded;
    cukit::from_floats(rounded, result);
    cukit::store(out + place, rounded);
  }
}
