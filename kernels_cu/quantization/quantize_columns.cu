// Scales and codes of columns, or of groups of consecutive rows of a column: channels of a key
// cache, weights stored [in, out]. Equations and rounding: common/quant/scales.cuh.
//
// Mapping: a thread block processes COLS_THREADS adjacent vectors of 16 bytes over all rows of a
//   block of values; THREADS / COLS_THREADS threads per vector divide the rows. Rows are read once
//   for the extremes and once for the codes; the second read hits L2 unless the columns are long.
// Shared memory: THREADS / COLS_THREADS rows of COLS_THREADS * 16 / sizeof(DTYPE) words per
//   extreme (two extremes with ZERO_POINTS), static.
// Macros: those of common/quant/scales.cuh and quantization/access.cuh; THREADS; COLS_THREADS;
//   ITEMS: rows that a thread loads at once.
// Minimum architecture: sm_80 (float8 rounding is done in software before sm_89). Deterministic.
// Reference: cukit/reference/quantize.py.
#include "common/platform.cuh"
#include "common/quant/scales.cuh"
#include "common/types.cuh"
#include "quantization/access.cuh"
#include "quantization/parameters.cuh"

namespace {

using cukit::Extremes;
using cukit::kValues;
using T = cukit::element_t;

constexpr int kRowThreads = THREADS / COLS_THREADS;  // threads that divide the rows of a column
constexpr int kWidth = COLS_THREADS * kValues;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) quantize_columns(
    const T* __restrict__ x,                // [num_matrices, rows, cols]
    unsigned char* __restrict__ storage,    // [num_matrices, rows, storage_cols]
    cukit::scale_t* __restrict__ scales,    // [num_matrices, blocks_down, cols]
    signed char* __restrict__ zero_points,  // like scales; null without ZERO_POINTS
    const __grid_constant__ cukit::BlockedMatrices at) {
  __shared__ int shared[Extremes::kCount][kRowThreads][kWidth];
  const int across = threadIdx.x % COLS_THREADS * kValues;
  const int row_thread = threadIdx.x / COLS_THREADS;
  const unsigned strips = static_cast<unsigned>((at.cols + kWidth - 1) / kWidth);
  const unsigned line = blockIdx.x / strips;  // block row, counted over all matrices
  const long long matrix = line / static_cast<unsigned>(at.blocks_down);
  const long long col = (blockIdx.x - line * strips) * static_cast<long long>(kWidth) + across;
  const long long count = at.cols - col;  // columns from this thread's first one on
  const long long first = (line - matrix * at.blocks_down) * at.block_rows;  // first row
  const long long rows = min(at.block_rows, at.rows - first);
  x += (matrix * at.rows + first) * at.cols + col;
  storage += (matrix * at.rows + first) * at.storage_cols + col / cukit::kCodesPerByte;

  // Calls f(vector, row) for every row of this thread, with ITEMS loads in flight. The last rows
  // may be beyond the block; their vectors are 0.
  const auto sweep = [&](auto f) {
    for (long long row = row_thread; row < rows; row += kRowThreads * ITEMS) {
      cukit::Values values[ITEMS];
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        const long long at_row = row + j * kRowThreads;
        values[j] = cukit::load_values(x + at_row * at.cols, at_row < rows ? count : 0);
      }
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) f(values[j], row + j * kRowThreads);
    }
  };

  Extremes extremes[kValues];
  sweep([&](const cukit::Values& values, long long) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) extremes[i].take(cukit::to_float(values[i]));
  });
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
#pragma unroll
    for (int j = 0; j < Extremes::kCount; ++j) {
      shared[j][row_thread][across + i] = extremes[i].bits[j];
    }
  }
  __syncthreads();
  // One thread per column combines the extremes of all row threads in row 0 of `shared`.
  for (int column = threadIdx.x; column < kWidth; column += THREADS) {
#pragma unroll
    for (int j = 0; j < Extremes::kCount; ++j) {
      int most = shared[j][0][column];
      for (int d = 1; d < kRowThreads; ++d) most = max(most, shared[j][d][column]);
      shared[j][0][column] = most;
    }
  }
  __syncthreads();
  cukit::Factors factors[kValues];
  const long long scale = line * at.cols + col;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
#pragma unroll
    for (int j = 0; j < Extremes::kCount; ++j) extremes[i].bits[j] = shared[j][0][across + i];
    factors[i] = cukit::factors_of(extremes[i]);
    if (row_thread == 0 && i < count) {
      scales[scale + i] = factors[i].scale;
      if constexpr (ZERO_POINTS) {
        zero_points[scale + i] = static_cast<signed char>(factors[i].inverse.zero_point);
      }
    }
  }
  sweep([&](const cukit::Values& values, long long row) {
    float scaled[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      scaled[i] = cukit::without_nan(factors[i].inverse.scaled(cukit::to_float(values[i])));
    }
    cukit::store_codes(storage + row * at.storage_cols, cukit::encode_values(scaled),
                       row < rows ? count : 0);
  });
}
