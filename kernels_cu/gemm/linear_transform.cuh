// The epilogue of a linear layer: bias, activation, gating (a Transform of
// common/hopper/gemm_epilogue.cuh).
#pragma once

#include "common/activation.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

// Activation: a type of common/activation.cuh. Columns: columns of a part's accumulators.
// Transposed: the features, with one bias element each, are the rows of the product instead of its
// columns.
template <typename T, typename Activation, int Parts, bool Keeps, int Columns, bool Transposed>
struct LinearTransform {
  static constexpr int kParts = Parts;
  static constexpr bool kKeeps = Keeps;
  static_assert(Columns % 8 == 0, "whole column tiles of wgmma");
  const T* bias;  // [features], or null
  int features;
  Vec<T, 2> pairs[Transposed ? 1 : Columns / 8];  // this lane's bias elements

  CUKIT_DEVICE LinearTransform(const T* bias, int features) : bias(bias), features(features) {}

  // With Keeps the kernel is register-limited, so prepare() loads the bias instead.
  CUKIT_DEVICE void begin(int row, int column) {
    if constexpr (!Keeps) load_bias(row, column);
  }

  template <int N>
  CUKIT_DEVICE void prepare(float (&acc)[N], int row, int column) {
    if constexpr (Keeps) load_bias(row, column);
    if (bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      acc[i] += to_float(Transposed ? pairs[0][i / 2 % 2] : pairs[i / 4][i % 2]);
    }
  }

  template <int N>
  CUKIT_DEVICE void operator()(float (&acc)[N], int, int) const {
#pragma unroll
    for (int i = 0; i < N / Parts; ++i) {
      const float gate = Activation::value(acc[i]);
      acc[i] = Parts == 2 ? gate * acc[N / 2 + i] : gate;
    }
  }

 private:
  CUKIT_DEVICE void load_bias(int row, int column) {
    if (bias == nullptr) return;
    if constexpr (Transposed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int feature = row + accumulator_row() + 8 * half;
        pairs[0][half] = feature < features ? bias[feature] : T(0.0f);
      }
    } else {
#pragma unroll
      for (int n = 0; n < Columns / 8; ++n) {
        const int feature = column + 8 * n + accumulator_column();
        pairs[n] = {};
        if (feature < features) load(pairs[n], bias + feature);
      }
    }
  }
};

}  // namespace cukit
