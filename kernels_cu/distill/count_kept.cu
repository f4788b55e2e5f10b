// Number of targets that are not ignored, at least 1: what a mean over rows divides by.
//
// Mapping: one block. Macros: ID int32|int64; THREADS multiple of 32, 32..1024.
// Minimum architecture: sm_80. Exact, deterministic.
#include "common/platform.cuh"
#include "common/index.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) count_kept(
    const cukit::id_t* __restrict__ targets,  // [rows]
    float* __restrict__ count,                // scalar
    long long rows, long long ignore_index) {
  __shared__ int counts[THREADS / cukit::kWarpSize];
  int kept = 0;
  for (long long row = threadIdx.x; row < rows; row += THREADS) kept += targets[row] != ignore_index;
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
