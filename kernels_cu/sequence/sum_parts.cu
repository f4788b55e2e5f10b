// Sums partial results in a fixed order.
//
//   sum[token, group, col] = before[token, group, col] + sum_p parts[token, group, p, col]
//
// Parts that are not in memory at the same time are summed by several launches. Each launch but the
// last stores its float sum in `after`, which is `before` of the next launch, so the result is
// bitwise equal to the result of a single launch.
//
// Mapping: grid (blocks of tokens x cols, groups of the launch), one thread per sum. Macros: DTYPE
//   float32|float16|bfloat16; THREADS. Minimum architecture: sm_80. Accumulates in float in a fixed order:
//   deterministic. Reference: numpy.sum(axis=2).
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(
    const T* __restrict__ parts,  // [tokens, groups, parts, cols]
    const float* before,          // [tokens, groups, cols] or null: 0
    float* after,                 // like `before`, may be the same; null: the sums go to `out`
    T* __restrict__ out,          // [tokens, num_groups, cols]: writes the groups of the launch,
                                  // from first_group on
    const __grid_constant__ cukit::SumParameters p) {
  const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= p.tokens * p.cols) return;
  const long long token = at / p.cols, col = at % p.cols;
  const long long row = token * gridDim.y + blockIdx.y;
  const T* from = parts + row * p.parts * p.cols + col;
  float sum = before == nullptr ? 0.0f : before[row * p.cols + col];
#pragma unroll 8
  for (int part = 0; part < p.parts; ++part) {
    sum += cukit::to_float(from[static_cast<long long>(part) * p.cols]);
  }
  if (after != nullptr) {
    after[row * p.cols + col] = sum;
  } else {
    out[(token * p.num_groups + p.first_group + blockIdx.y) * p.cols + col] = cukit::from_float<T>(sum);
  }
}
