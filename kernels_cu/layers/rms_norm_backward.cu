// Gradients of RMSNorm.
//
//   r = rsqrt(mean(x^2) + eps),  d = sum_j g_j w_j x_j
//   grad_x = r g w - x r^3 d / cols (+ grad_residual)
//   grad_weight = sum over rows of g x r
//
// Mapping: a persistent grid; block b makes the passes b, b + gridDim.x, ... over the rows, which are
//   distributed over threads as in rows.cuh. A thread holds the same columns in every row and
//   accumulates their grad_weight in registers. At its end block b writes its sums to row b of
//   `grad_weight_partial`; column_sum.cu reduces those rows.
// Shared memory: static, 4 * ROWS * THREADS / 32 floats for long rows; for short rows a few floats and
//   kColumnScratch of rows.cuh. Dynamic: that of row_feed.cuh with PREFETCH.
// Macros: DTYPE float32|float16|bfloat16; THREADS, LANES, VEC (VEC * sizeof(DTYPE) <= 16, 16 with
//   PREFETCH), VECS_PER_THREAD, ROWS of rows.cuh; PREFETCH 0|1, FULL 0|1 of row_feed.cuh; RESIDUAL
//   0|1 (adds grad_residual to grad_x); BLOCKS_PER_SM resident blocks, which limits the registers
//   per thread.
// Requires cols % VEC == 0 and cols <= LANES * VEC * VECS_PER_THREAD. Minimum architecture: sm_80.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/norms.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "layers/row_feed.cuh"
#include "layers/rows.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) rms_norm_backward(
    const T* __restrict__ grad_out,            // [rows, cols]
    const T* __restrict__ x,                   // [rows, cols]
    const T* __restrict__ weight,              // [cols]
    const T* __restrict__ grad_residual,       // [rows, cols], RESIDUAL only
    T* __restrict__ grad_x,                    // [rows, cols]
    float* __restrict__ grad_weight_partial,   // [gridDim.x, cols]
    int rows, int given_cols, float eps) {
  __shared__ float scratch[2][2 * ROWS * cukit::kScratch];
  __shared__ float column_scratch[cukit::kColumnScratch];
  CUKIT_DYNAMIC_SHARED(Vector, slots);
  const cukit::RowShare share;
  const int cols = cukit::row_length(given_cols);
  const int num_vecs = cols / VEC;
  const long long begin = static_cast<long long>(blockIdx.x) * cukit::kPassRows;
  const long long stride = static_cast<long long>(gridDim.x) * cukit::kPassRows;
  const cukit::PassWeights<T> weights(weight, num_vecs);
  cukit::RowFeed feed(x, grad_out, rows, cols, begin, stride, slots);

  const float inverse_cols = 1.0f / cols;
  float grad_weight[VECS_PER_THREAD][VEC] = {};
  int turn = 0;
  for (long long first_row = begin; first_row < rows; first_row += stride, turn ^= 1) {
    Vector values[ROWS][VECS_PER_THREAD], grads[ROWS][VECS_PER_THREAD];
    feed.take(values, grads, first_row);
    float sums[2 * ROWS];  // of x^2 and of g w x, for each row
#pragma unroll
    for (int n = 0; n < 2 * ROWS; ++n) sums[n] = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (share.vec(i) >= num_vecs) continue;
      float w[VEC];
      cukit::to_floats(w, weights(i));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (share.row(first_row, r) >= rows) continue;
        float v[VEC], g[VEC];
        cukit::to_floats(v, values[r][i]);
        cukit::to_floats(g, grads[r][i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          sums[2 * r] += v[j] * v[j];
          sums[2 * r + 1] += g[j] * w[j] * v[j];
        }
      }
    }
    cukit::row_sums(sums, scratch[turn]);
    cukit::stay_packed(values);
    cukit::stay_packed(grads);

    float rstd[ROWS], along_x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      rstd[r] = rsqrtf(sums[2 * r] * inverse_cols + eps);
      along_x[r] = rstd[r] * rstd[r] * rstd[r] * sums[2 * r + 1] * inverse_cols;
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = share.vec(i);
      if (vec >= num_vecs) continue;
      float w[VEC];
      cukit::to_floats(w, weights(i));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const long long row = share.row(first_row, r);
        if (row >= rows) continue;
        float v[VEC], g[VEC], add[VEC];
        cukit::to_floats(v, values[r][i]);
        cukit::to_floats(g, grads[r][i]);
        if constexpr (RESIDUAL) {
          Vector read;
          cukit::load<cukit::Cache::Kept>(read, grad_residual + row * cols + vec * VEC);
          cukit::to_floats(add, read);
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float scaled = g[j] * rstd[r];
          grad_weight[i][j] += scaled * v[j];
          g[j] = scaled * w[j] - v[j] * along_x[r];
          if constexpr (RESIDUAL) g[j] += add[j];
        }
        Vector result;
        cukit::from_floats(result, g);
        cukit::store(grad_x + row * cols + vec * VEC, result);
      }
    }
  }
  float* const partial = grad_weight_partial + static_cast<long long>(blockIdx.x) * cols;
  cukit::write_column_sums(grad_weight, partial, cols, column_scratch);
}
