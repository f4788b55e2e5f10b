// The divisor of a mean loss: the number of rows whose target is not ignored, at least 1; with
// weights, the sum of these rows' weights, or 1 if it is 0.
//
// Mapping: one block. Macros: ID int32|int64; THREADS multiple of 32, 32..1024.
// Minimum architecture: sm_80. Rows are counted in int; weights are summed in float in a fixed
// order: deterministic.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) count_kept(
    const cukit::id_t* __restrict__ targets,  // [rows]; null: no row is ignored
    const float* __restrict__ token_weights,  // [rows]; null: count rows
    float* __restrict__ count,                // scalar
    long long rows, long long ignore_index) {
  __shared__ int counts[THREADS / cukit::kWarpSize];
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  int kept = 0;
  float weight = 0.0f;
  for (long long row = threadIdx.x; row < rows; row += THREADS) {
    if (targets != nullptr && targets[row] == ignore_index) continue;
    ++kept;
    if (token_weights != nullptr) weight += token_weights[row];
  }
  if (token_weights != nullptr) {
    weight = cukit::block_reduce<cukit::Sum, THREADS>(weight, scratch);
    if (threadIdx.x == 0) *count = weight == 0.0f ? 1.0f : weight;
    return;
  }
  for (int offset = cukit::kWarpSize / 2; offset > 0; offset /= 2) {
    kept += __shfl_xor_sync(cukit::kFullMask, kept, offset);
  }
  if (threadIdx.x % cukit::kWarpSize == 0) counts[threadIdx.x / cukit::kWarpSize] = kept;
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int i = 0; i < THREADS / cukit::kWarpSize; ++i) total += counts[i];
    *count = static_cast<float>(max(total, 1));
  }
}
