// RMSNorm over rows, optionally with the residual addition that comes before it.
//
//   s = x + residual (rounded to the element type and written back)     or  s = x
//   y = s * rsqrt(mean(s^2) + eps) * weight
//
// Paper: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
// Mapping: rows.cuh says how threads share rows; a block makes one pass. Every element is read from
//   device memory once.
// Shared memory: ROWS * THREADS / 32 floats for long rows, static.
// Macros: DTYPE float32|float16|bfloat16; THREADS, LANES, VEC (VEC * sizeof(DTYPE) <= 16),
//   VECS_PER_THREAD, ROWS of rows.cuh; LOADS Cached|Kept|Streaming, of x; RESIDUAL 0|1.
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
  const long long first_row = static_cast<long long>(blockIdx.x) * cukit::kPassRows;

  // work(vectors, vec, i) for each vector of the r-th row that this thread holds
  const auto for_each = [&](int r, const auto& work) {
    const long long row = share.row(first_row, r);
    if (row >= rows) return;
    const cukit::RowVectors vectors(row, cols);
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (vectors.has(share.vec(i))) work(vectors, share.vec(i), i);
    }
  };

  Vector values[ROWS][VECS_PER_THREAD];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const T* from = x + share.row(first_row, r) * cols;
    for_each(r, [&](const cukit::RowVectors& row, int vec, int i) {
      row.load_from<cukit::Cache::LOADS>(values[r][i], from, vec);
    });
  }
  // Rows of one thread share the weight, if they begin alike: with several it waits in registers from
  // the start.
  Vector scale[VECS_PER_THREAD];
  const auto load_weight = [&](int r) {
    for_each(r, [&](const cukit::RowVectors& row, int vec, int i) {
      row.load_columns(scale[i], weight, vec);
    });
  };
  constexpr bool kEarlyWeight = ROWS > 1 && PIECE == VEC;
  if constexpr (kEarlyWeight) load_weight(0);
  if constexpr (RESIDUAL) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const long long offset = share.row(first_row, r) * cols;
      for_each(r, [&](const cukit::RowVectors& row, int vec, int i) {
        Vector read;
        row.load_from<cukit::Cache::Kept>(read, residual + offset, vec);
        float v[VEC], add[VEC];
        cukit::to_floats(v, values[r][i]);
        cukit::to_floats(add, read);
#pragma unroll
        for (int j = 0; j < VEC; ++j) v[j] += add[j];
        cukit::from_floats(values[r][i], v);
        row.store_to(new_residual + offset, values[r][i], vec);
      });
    }
  }

  float sums[ROWS];  // of squares
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sums[r] = 0.0f;
    for_each(r, [&](const cukit::RowVectors&, int, int i) {
      float v[VEC];
      cukit::to_floats(v, values[r][i]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[r] += v[j] * v[j];
    });
  }
  cukit::row_sums(sums, scratch);
  cukit::stay_packed(values);

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if constexpr (!kEarlyWeight) load_weight(r);
    const float rstd = rsqrtf(sums[r] / cols + eps);
    T* to = y + share.row(first_row, r) * cols;
    for_each(r, [&](const cukit::RowVectors& row, int vec, int i) {
      float v[VEC], w[VEC];
      cukit::to_floats(v, values[r][i]);
      cukit::to_floats(w, scale[i]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[j] = v[j] * rstd * w[j];
      cukit::from_floats(values[r][i], v);
      row.store_to(to, values[r][i], vec);
    });
  }
}
