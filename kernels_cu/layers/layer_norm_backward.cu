// Gradients of LayerNorm.
//
//   n      = (x - mean(x)) * rstd,  g = grad_out * weight
//   grad_x = rstd * (g - mean(g) - n * mean(g * n)) (+ grad_residual)
//   grad_weight = sum over rows of grad_out * n,  grad_bias = sum over rows of grad_out
//
// Mapping: a block takes rows b, b + gridDim.x, ..., thread t the vectors t, t + THREADS, ... of each,
//   and keeps its columns' share of the weight and bias gradients in registers until it has done its
//   last row. The shares go to `partial`, which column_sum.cu adds up. Mean and rstd are computed
//   again: x is here anyway. Shared memory: 3 * THREADS / 32 floats, static.
// Macros: DTYPE float32|float16|bfloat16; THREADS multiple of 32, 32..1024; VEC elements an access
//   (VEC * sizeof(DTYPE) <= 16); VECS_PER_THREAD vectors a thread holds; RESIDUAL 0|1 (a gradient to
//   add to grad_x); BIAS 0|1; BLOCKS_PER_SM resident at once, which limits the registers of a thread.
// Needs cols % VEC == 0 and cols <= THREADS * VEC * VECS_PER_THREAD. Minimum architecture: sm_80.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/norms.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

constexpr int kPartials = BIAS ? 2 : 1;

}  // namespace

extern "C" __global__ void
__launch_bounds__(THREADS, BLOCKS_PER_SM) layer_norm_backward(
    const T* __restrict__ grad_out,       // [rows, cols]
    const T* __restrict__ x,              // [rows, cols]
    const T* __restrict__ weight,         // [cols]
    const T* __restrict__ grad_residual,  // [rows, cols], RESIDUAL only
    T* __restrict__ grad_x,               // [rows, cols]
    float* __restrict__ partial,          // [gridDim.x, kPartials, cols]: of weight, of bias
    int rows, int cols, float eps) {
  __shared__ float scratch[3 * THREADS / cukit::kWarpSize];
  const int num_vecs = cols / VEC;

  float grad_weight[VECS_PER_THREAD][VEC] = {};
  float grad_bias[VECS_PER_THREAD][VEC] = {};
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long base = static_cast<long long>(row) * cols;
    Vector values[VECS_PER_THREAD], grads[VECS_PER_THREAD];
    float sum = 0.0f;

#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec >= num_vecs) continue;
      cukit::load<cukit::Cache::Kept>(values[i], x + base + vec * VEC);
      cukit::load<cukit::Cache::Kept>(grads[i], grad_out + base + vec * VEC);
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (threadIdx.x + i * THREADS >= num_vecs) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum += cukit::to_float(values[i][j]);
    }
    const float mean = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch) / cols;

    float sums[3] = {0.0f, 0.0f, 0.0f};  // (x - mean)^2, g, g (x - mean)
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec >= num_vecs) continue;
      Vector scale;
      cukit::load(scale, weight + vec * VEC);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float centred = cukit::to_float(values[i][j]) - mean;
        const float grad = cukit::to_float(grads[i][j]) * cukit::to_float(scale[j]);
        sums[0] += centred * centred;
        sums[1] += grad;
        sums[2] += grad * centred;
      }
    }
    cukit::block_reduce<cukit::Sum, THREADS>(sums, scratch);
    const float rstd = rsqrtf(sums[0] / cols + eps);
    const float mean_grad = sums[1] / cols;
    const float along_n = sums[2] * rstd / cols;

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
        const float normalised = (cukit::to_float(values[i][j]) - mean) * rstd;
        const float grad = cukit::to_float(grads[i][j]);
        const float scaled = grad * cukit::to_float(scale[j]);
        float grad_value = rstd * (scaled - mean_grad - normalised * along_n);
        if constexpr (RESIDUAL) grad_value += cukit::to_float(add[j]);
        result[j] = cukit::from_float<T>(grad_value);
        grad_weight[i][j] += grad * normalised;
        grad_bias[i][j] += grad;
      }
      cukit::store(grad_x + base + vec * VEC, result);
    }
  }

  float* own = partial + static_cast<long long>(blockIdx.x) * kPartials * cols;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int vec = threadIdx.x + i * THREADS;
    if (vec >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      own[vec * VEC + j] = grad_weight[i][j];
      if constexpr (BIAS) own[cols + vec * VEC + j] = grad_bias[i][j];
    }
  }
}
