// Gradients of RMSNorm.
//
//   r = rsqrt(mean(x^2) + eps),  d = sum_j g_j w_j x_j
//   grad_x = r g w - x r^3 d / cols (+ grad_residual)
//   grad_weight = sum over rows of g x r
//
// Mapping: a fixed number of blocks; block b takes rows b, b + gridDim.x, ... A thread owns the same
//   columns in every row, so it keeps its share of grad_weight in registers and writes it once, to
//   row b of `grad_weight_partial`; column_sum.cu adds those rows up.
// Shared memory: 2 * THREADS / 32 floats, static.
// Macros: DTYPE float32|float16|bfloat16; THREADS multiple of 32, 32..1024; VEC elements an access;
//   VECS_PER_THREAD vectors a thread holds; RESIDUAL 0|1 (a gradient to add to grad_x).
// Needs cols % VEC == 0 and cols <= THREADS * VEC * VECS_PER_THREAD. Minimum architecture: sm_80.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/norms.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_backward(
    const T* __restrict__ grad_out,            // [rows, cols]
    const T* __restrict__ x,                   // [rows, cols]
    const T* __restrict__ weight,              // [cols]
    const T* __restrict__ grad_residual,       // [rows, cols], RESIDUAL only
    T* __restrict__ grad_x,                    // [rows, cols]
    float* __restrict__ grad_weight_partial,   // [gridDim.x, cols]
    int rows, int cols, float eps) {
  __shared__ float scratch[2 * THREADS / cukit::kWarpSize];
  const int num_vecs = cols / VEC;

  float grad_weight[VECS_PER_THREAD][VEC] = {};
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long base = static_cast<long long>(row) * cols;
    Vector values[VECS_PER_THREAD], grads[VECS_PER_THREAD];
    float sums[2] = {0.0f, 0.0f};  // x^2 and g w x

#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec >= num_vecs) continue;
      cukit::load<cukit::Cache::Kept>(values[i], x + base + vec * VEC);
      cukit::load<cukit::Cache::Kept>(grads[i], grad_out + base + vec * VEC);
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec >= num_vecs) continue;
      Vector scale;
      cukit::load(scale, weight + vec * VEC);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float value = cukit::to_float(values[i][j]);
        sums[0] += value * value;
        sums[1] += cukit::to_float(grads[i][j]) * cukit::to_float(scale[j]) * value;
      }
    }
    cukit::block_reduce<cukit::Sum, THREADS>(sums, scratch);
    const float rstd = rsqrtf(sums[0] / cols + eps);
    const float along_x = rstd * rstd * rstd * sums[1] / cols;

#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec >= num_vecs) continue;
      Vector scale, result, add;
      cukit::load(scale, weight + vec * VEC);
      if constexpr (RESIDUAL) {
        cukit::load<cukit::Cache::Kept>(add, grad_residual + base + vec * VEC);
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float value = cukit::to_float(values[i][j]);
        const float grad = cukit::to_float(grads[i][j]);
        float grad_value = rstd * grad * cukit::to_float(scale[j]) - value * along_x;
        if constexpr (RESIDUAL) grad_value += cukit::to_float(add[j]);
        result[j] = cukit::from_float<T>(grad_value);
        grad_weight[i][j] += grad * value * rstd;
      }
      cukit::store(grad_x + base + vec * VEC, result);
    }
  }

  const long long partial_base = static_cast<long long>(blockIdx.x) * cols;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int vec = threadIdx.x + i * THREADS;
    if (vec >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      grad_weight_partial[partial_base + vec * VEC + j] = grad_weight[i][j];
    }
  }
}
