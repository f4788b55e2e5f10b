// What a linear layer does to its accumulators: bias, activation, gating (a Transform of
// common/hopper/gemm.cuh).
#pragma once

#include "common/activation.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

// Activation: a type of common/activation.cuh. Transposed: the rows of the product are the features,
// which bias belongs to, not the columns.
template <typename T, typename Activation, int Parts, bool Keeps, bool Transposed>
struct LinearTransform {
  static constexpr int kParts = Parts;
  static constexpr bool kKeeps = Keeps;
  const T* bias;  // [features], or null
  int features;

  template <int N>
  CUKIT_DEVICE void prepare(float (&sums)[N], int row, int column) const {
    if (bias == nullptr) return;
    if constexpr (Transposed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int feature = row + accumulator_row() + 8 * half;
        const float value = feature < features ? to_float(bias[feature]) : 0.0f;
#pragma unroll
        for (int n = 0; n < N / 4; ++n) {
          sums[4 * n + 2 * half] += value;
          sums[4 * n + 2 * half + 1] += value;
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < N / 4; ++n) {
        const int feature = column + 8 * n + accumulator_column();
        Vec<T, 2> pair = {};
        if (feature < features) load(pair, bias + feature);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[4 * n + i] += to_float(pair[i % 2]);
      }
    }
  }

  template <int N>
  CUKIT_DEVICE void operator()(float (&sums)[N], int, int) const {
#pragma unroll
    for (int i = 0; i < N / Parts; ++i) {
      const float gate = Activation::value(sums[i]);
      sums[i] = Parts == 2 ? gate * sums[N / 2 + i] : gate;
    }
  }
};

}  // namespace cukit
