// LayerNorm over rows, optionally with the residual addition that comes before it.
//
//   s = x + residual (rounded to the element type and written back)     or  s = x
//   y = (s - mean(s)) * rsqrt(var(s) + eps) * weight + bias
//
// Paper: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
// Mapping: one block a row; thread t holds the vectors t, t + THREADS, ... of its row in registers,
//   so that every element is read from device memory once, and the variance is summed from
//   differences to the mean, without cancellation. Block b takes rows b, b + gridDim.x, ...
// Shared memory: THREADS / 32 floats, static.
// Macros: DTYPE float32|float16|bfloat16; THREADS multiple of 32, 32..1024; VEC elements an access
//   (VEC * sizeof(DTYPE) <= 16); VECS_PER_THREAD vectors a thread holds; RESIDUAL 0|1; BIAS 0|1.
// Needs cols % VEC == 0 and cols <= THREADS * VEC * VECS_PER_THREAD. Minimum architecture: sm_80.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/norms.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) layer_norm(
    const T* __restrict__ x,         // [rows, cols]
    const T* __restrict__ residual,  // [rows, cols], RESIDUAL only
    const T* __restrict__ weight,    // [cols]
    const T* __restrict__ bias,      // [cols], BIAS only
    T* __restrict__ y,               // [rows, cols]
    T* __restrict__ new_residual,    // [rows, cols], RESIDUAL only
    int rows, int cols, float eps) {
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  const int num_vecs = cols / VEC;

  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long base = static_cast<long long>(row) * cols;
    Vector values[VECS_PER_THREAD];

#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec < num_vecs) cukit::load<cukit::Cache::Kept>(values[i], x + base + vec * VEC);
    }
    if constexpr (RESIDUAL) {
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int vec = threadIdx.x + i * THREADS;
        if (vec >= num_vecs) continue;
        Vector add;
        cukit::load<cukit::Cache::Kept>(add, residual + base + vec * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          values[i][j] = cukit::from_float<T>(cukit::to_float(values[i][j]) + cukit::to_float(add[j]));
        }
        cukit::store(new_residual + base + vec * VEC, values[i]);
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (threadIdx.x + i * THREADS >= num_vecs) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum += cukit::to_float(values[i][j]);
    }
    const float mean = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch) / cols;

    float sum_of_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (threadIdx.x + i * THREADS >= num_vecs) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float centred = cukit::to_float(values[i][j]) - mean;
        sum_of_squares += centred * centred;
      }
    }
    sum_of_squares = cukit::block_reduce<cukit::Sum, THREADS>(sum_of_squares, scratch);
    const float rstd = rsqrtf(sum_of_squares / cols + eps);

#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = threadIdx.x + i * THREADS;
      if (vec >= num_vecs) continue;
      Vector scale, shift;
      cukit::load(scale, weight + vec * VEC);
      if constexpr (BIAS) cukit::load(shift, bias + vec * VEC);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float normalised = (cukit::to_float(values[i][j]) - mean) * rstd;
        float result = normalised * cukit::to_float(scale[j]);
        if constexpr (BIAS) result += cukit::to_float(shift[j]);
        values[i][j] = cukit::from_float<T>(result);
      }
      cukit::store(y + base + vec * VEC, values[i]);
    }
  }
}
