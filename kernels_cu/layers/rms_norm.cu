// RMSNorm over rows, optionally fused with the preceding residual addition.
//
//   s = x + residual (rounded to the element type and written back)     or  s = x
//   y = s * rsqrt(mean(s^2) + eps) * weight
//
// Paper: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
// Mapping: rows over threads as in rows.cuh; one pass per block. Every element is read from device
//   memory once.
// Shared memory: static, ROWS * THREADS / 32 floats for long rows, ROWS for short ones.
// Macros: DTYPE float32|float16|bfloat16; THREADS, LANES, VEC (VEC * sizeof(DTYPE) <= 16),
//   VECS_PER_THREAD, ROWS of rows.cuh; LOADS Cached|Kept|Streaming, the cache policy of x; RESIDUAL
//   0|1.
// Needs cols % VEC == 0 and cols <= LANES * VEC * VECS_PER_THREAD. Minimum architecture: sm_80.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/norms.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "layers/rows.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(
    const T* __restrict__ x,         // [rows, cols]
    const T* __restrict__ residual,  // [rows, cols], RESIDUAL only
    const T* __restrict__ weight,    // [cols]
    T* __restrict__ y,               // [rows, cols]
    T* __restrict__ new_residual,    // [rows, cols], RESIDUAL only
    int rows, int cols, float eps) {
  __shared__ float scratch[ROWS * cukit::kScratch];
  const cukit::RowShare share;
  const int num_vecs = cols / VEC;
  const long long first_row = static_cast<long long>(blockIdx.x) * cukit::kPassRows;

  const auto holds = [&](int r, int i) {
    return share.row(first_row, r) < rows && share.vec(i) < num_vecs;
  };

  Vector values[ROWS][VECS_PER_THREAD];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const long long row = share.row(first_row, r);
    if (row >= rows) continue;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = share.vec(i);
      if (vec < num_vecs) cukit::load<cukit::Cache::LOADS>(values[r][i], x + row * cols + vec * VEC);
    }
  }
  // With several rows per thread the weight is reused, so it is loaded early, together with x.
  Vector scale[VECS_PER_THREAD];
  const auto load_weight = [&] {
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (share.vec(i) < num_vecs) cukit::load(scale[i], weight + share.vec(i) * VEC);
    }
  };
  if constexpr (ROWS > 1) load_weight();
  if constexpr (RESIDUAL) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const long long row = share.row(first_row, r);
      if (row >= rows) continue;
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int vec = share.vec(i);
        if (vec >= num_vecs) continue;
        Vector read;
        cukit::load<cukit::Cache::Kept>(read, residual + row * cols + vec * VEC);
        float v[VEC], add[VEC];
        cukit::to_floats(v, values[r][i]);
        cukit::to_floats(add, read);
#pragma unroll
        for (int j = 0; j < VEC; ++j) v[j] += add[j];
        cukit::from_floats(values[r][i], v);
        cukit::store(new_residual + row * cols + vec * VEC, values[r][i]);
      }
    }
  }

  float sums[ROWS];  // of squares
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sums[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (!holds(r, i)) continue;
      float v[VEC];
      cukit::to_floats(v, values[r][i]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[r] += v[j] * v[j];
    }
  }
  cukit::row_sums(sums, scratch);
  cukit::stay_packed(values);

  if constexpr (ROWS == 1) load_weight();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const long long row = share.row(first_row, r);
    if (row >= rows) continue;
    const float rstd = rsqrtf(sums[r] / cols + eps);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = share.vec(i);
      if (vec >= num_vecs) continue;
      float v[VEC], w[VEC];
      cukit::to_floats(v, values[r][i]);
      cukit::to_floats(w, scale[i]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[j] = v[j] * rstd * w[j];
      cukit::from_floats(values[r][i], v);
      cukit::store(y + row * cols + vec * VEC, values[r][i]);
    }
  }
}
