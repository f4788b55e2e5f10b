// Sums the rows of a float matrix: the second stage of gradients that are summed over rows.
//
//   out[c] = sum_r partial[r, c]
//
// Mapping: a block owns 32 columns; warp w of its THREADS / 32 warps sums rows w, w + warps, ...,
//   and the warps' sums are added in order.
// Shared memory: THREADS floats, static.
// Macros: DTYPE float32|float16|bfloat16 (of `out`); THREADS multiple of 32.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: numpy.sum(axis=0).
#include "common/platform.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) column_sum(
    const float* __restrict__ partial,  // [rows, cols]
    T* __restrict__ out,                // [cols]
    int rows, int cols) {
  constexpr int kWarps = THREADS / cukit::kWarpSize;
  __shared__ float sums[kWarps][cukit::kWarpSize];
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int col = blockIdx.x * cukit::kWarpSize + lane;

  float sum = 0.0f;
  if (col < cols) {
#pragma unroll 8
    for (int row = warp; row < rows; row += kWarps) {
      sum += partial[static_cast<long long>(row) * cols + col];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && col < cols) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[w][lane];
    out[col] = cukit::from_float<T>(total);
  }
}
