// Epilogue of products of quantised matrices: scales, zero points, bias and stores.
//
//   value = (sum - zero_point[row] * column_sum[column]) * a_scale[row] * b_scale[column]
//           + bias[column]
//
// Zero points apply to integer sums only.
//
// A lane has tensor-core accumulators of two rows, 8 apart. With `row` and `column` the lane's
// first, element 4 n + 2 half + i is in row + 8 half, column + 8 n + i; `column` is even.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

// Factors of rows or columns: one each, one for all (stride 0), or none (null: 1).
struct ScaleVector {
  const float* scales;
  int stride;

  CUKIT_DEVICE float at(int index, int count) const {
    if (scales == nullptr) return 1.0f;
    return index < count ? __ldg(scales + index * stride) : 0.0f;
  }
};

// Whether results of this type are the unscaled integer accumulators.
template <typename Out>
constexpr bool kIsExact = false;
template <>
constexpr bool kIsExact<int> = true;

// Scales, zero points, bias and destination of a product's result, of type `Out`.
template <typename Out>
struct ScaledResult {
  ScaleVector a, b;
  const signed char* zero_points;  // of rows of a, strided like a.scales; or null
  const int* column_sums;          // of b's codes along k; only with zero_points
  const Out* bias;                 // of columns, or null
  Out* out;                        // [rows, columns]
  int rows, columns;

  // Converts sums from index `first` on to floats; applies scales, zero points and bias.
  template <typename Sum, int N, int All>
  CUKIT_DEVICE void scale(float (&values)[N], const Sum (&sums)[All], int first, int row,
                          int column) const {
    const float row_scale[2] = {a.at(row, rows), a.at(row + 8, rows)};
    scale(values, sums, first, row, column, row_scale,
          [&](int n, int i) { return b.at(column + 8 * n + i, columns); });
  }

  // The same with preloaded scales: scale_of(n, i) is the scale of column + 8 n + i. Called by all
  // lanes of the warp.
  template <typename Sum, int N, int All, typename ScaleOf>
  CUKIT_DEVICE void scale(float (&values)[N], const Sum (&sums)[All], int first, int row, int column,
                          const float (&row_scale)[2], const ScaleOf& scale_of) const {
    if (zero_points == nullptr && bias == nullptr) {  // warp-uniform: avoids a test per column
#pragma unroll
      for (int n = 0; n < N / 4; ++n) {
        const float column_scale[2] = {scale_of(n, 0), scale_of(n, 1)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[4 * n + i] = static_cast<float>(sums[first + 4 * n + i]) * row_scale[i / 2] *
                              column_scale[i % 2];
        }
      }
      return;
    }
    int zero_point[2] = {};
    if (zero_points != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half < rows) zero_point[half] = zero_points[(row + 8 * half) * a.stride];
      }
    }
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      float column_scale[2], offset[2];
      int column_sum[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = column + 8 * n + i;
        column_scale[i] = scale_of(n, i);
        column_sum[i] = zero_points != nullptr && at < columns ? __ldg(column_sums + at) : 0;
        offset[i] = bias != nullptr && at < columns ? to_float(bias[at]) : 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int element = 4 * n + 2 * half + i;
          const Sum sum = centred(sums[first + element], zero_point[half], column_sum[i]);
          values[element] =
              static_cast<float>(sum) * row_scale[half] * column_scale[i] + offset[i];
        }
    }
  }

  // Stores Count values, from index `first` on, two neighbours at a time where rows have an even
  // number of columns; columns from `end` on are skipped.
  template <int Count, typename Value, int All>
  CUKIT_DEVICE void write_pairs(const Value (&values)[All], int first, int row, int column,
                                int end) const {
    const bool even = columns % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= rows) continue;
      Out* const to = out + static_cast<long long>(row + 8 * half) * columns;
#pragma unroll
      for (int n = 0; n < Count / 4; ++n) {
        const int at = column + 8 * n;
        Vec<Out, 2> pair;
        pair[0] = rounded(values[first + 4 * n + 2 * half]);
        pair[1] = rounded(values[first + 4 * n + 2 * half + 1]);
        if (even) {
          if (at < end) store(to + at, pair);
        } else {
          if (at < end) to[at] = pair[0];
          if (at + 1 < end) to[at + 1] = pair[1];
        }
      }
    }
  }

 private:
  CUKIT_DEVICE static float centred(float sum, int, int) { return sum; }
  CUKIT_DEVICE static int centred(int sum, int zero_point, int column_sum) {
    return sum - zero_point * column_sum;
  }
  CUKIT_DEVICE static Out rounded(float value) { return from_float<Out>(value); }
  CUKIT_DEVICE static int rounded(int value) { return value; }
};

}  // namespace cukit
