// Sum of the partial results of a matrix product that was split over its inner extent.
//
//   out = alpha * sum_s partials[s]
//
// Mapping: a thread for every VEC neighbouring elements. No shared memory.
// Macros: DTYPE float32|float16|bfloat16 of the result; THREADS; VEC 1|4, a divisor of `size`.
// Minimum architecture: sm_80. Float accumulation in a fixed order: deterministic.
#include "common/platform.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) sum_partials(
    const float* __restrict__ partials,  // [splits, size]
    T* __restrict__ out,                 // [size]
    long long size, int splits, float alpha) {
  const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  if (at >= size) return;
  float sums[VEC] = {};
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    cukit::Vec<float, VEC> part;
    cukit::load(part, partials + split * size + at);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sums[j] += part[j];
  }
  cukit::Vec<T, VEC> result;
#pragma unroll
  for (int j = 0; j < VEC; ++j) result[j] = cukit::from_float<T>(alpha * sums[j]);
  cukit::store(out + at, result);
}
