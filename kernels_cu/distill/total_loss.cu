// Sums the losses of all rows in a fixed order.
//
//   totals = (soft_weight * soft + hard_weight * hard, soft, hard),
//   soft = sum soft_rows * inverse / normalizer, hard likewise; a missing array counts as zeros.
//
// Mapping: one block. Macros: THREADS multiple of 32, 32..1024.
// Minimum architecture: sm_80. Float accumulation, deterministic.
#include "common/platform.cuh"
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) total_loss(
    const float* __restrict__ soft_rows,   // [rows] or null
    const float* __restrict__ hard_rows,   // [rows] or null
    const float* __restrict__ normalizer,  // scalar or null
    float* __restrict__ totals,            // [3]
    long long rows, float inverse, float soft_weight, float hard_weight) {
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  float soft = 0.0f;
  float hard = 0.0f;
  for (long long row = threadIdx.x; row < rows; row += THREADS) {
    if (soft_rows != nullptr) soft += soft_rows[row];
    if (hard_rows != nullptr) hard += hard_rows[row];
  }
  soft = cukit::block_reduce<cukit::Sum, THREADS>(soft, scratch);
  hard = cukit::block_reduce<cukit::Sum, THREADS>(hard, scratch);
  if (threadIdx.x == 0) {
    const float factor = normalizer != nullptr ? inverse / *normalizer : inverse;
    soft *= factor;
    hard *= factor;
    // A loss of weight 0 is not added: it may be infinite.
    totals[0] = (soft_weight != 0.0f ? soft_weight * soft : 0.0f) +
                (hard_weight != 0.0f ? hard_weight * hard : 0.0f);
    totals[1] = soft;
    totals[2] = hard;
  }
}
