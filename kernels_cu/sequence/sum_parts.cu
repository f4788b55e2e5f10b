// Sums partial results in a fixed order.
//
//   out[row, col] = sum_p parts[row, p, col]
//
// Mapping: one thread per element of `out`. Macros: DTYPE float32|float16|bfloat16; THREADS. Minimum architecture:
//   sm_80. Accumulates in float in a fixed order: deterministic. Reference: numpy.sum(axis=1).
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(
    const T* __restrict__ parts,  // [rows, parts, cols]
    T* __restrict__ out,          // [rows, cols]
    const __grid_constant__ cukit::SumParameters p) {
  const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= p.rows * p.cols) return;
  const T* from = parts + at / p.cols * p.parts * p.cols + at % p.cols;
  float sum = 0.0f;
#pragma unroll 8
  for (int part = 0; part < p.parts; ++part) {
    sum += cukit::to_float(from[static_cast<long long>(part) * p.cols]);
  }
  out[at] = cukit::from_float<T>(sum);
}
