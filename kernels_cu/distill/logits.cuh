// Logits z from the elements x of a tensor.
//
//   TRANSFORM 0: z = x.
//   TRANSFORM 1: z = scale * x, or with a cap z = cap * tanh(scale * x / cap).
//
// A vector with all |scale * x / cap| below kSmall, the usual case in models with a cap, uses a
// polynomial; any other vector uses an exponential and a division per element.
//
// Macros: DTYPE; TRANSFORM 0|1.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"
#include "distill/parameters.cuh"

namespace cukit {

class Logits {
 public:
  Logits() = default;

  CUKIT_DEVICE explicit Logits(const LogitTransform& transform) {
    if constexpr (TRANSFORM) transform_ = transform;
  }

  template <int N>
  CUKIT_DEVICE void load(float (&z)[N], const Vec<element_t, N>& from) const {
    to_floats(z, from);
    if constexpr (TRANSFORM) apply(z);
  }

  CUKIT_DEVICE float of(float x) const {
    if constexpr (TRANSFORM) {
      float z[1] = {x};
      apply(z);
      return z[0];
    }
    return x;
  }

  // Multiplies gradients with respect to z by dz / dx.
  template <int N>
  CUKIT_DEVICE void chain(float (&gradient)[N], const float (&z)[N]) const {
    if constexpr (TRANSFORM) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float share = z[j] * transform_.inverse_cap;
        gradient[j] *= transform_.scale * fmaxf(fmaf(-share, share, 1.0f), 0.0f);
      }
    }
  }

  CUKIT_DEVICE float chained(float gradient, float z) const {
    float gradients[1] = {gradient};
    const float logits[1] = {z};
    chain(gradients, logits);
    return gradients[0];
  }

 private:
  static constexpr float kSmall = 0.625f;

  // tanh(y) / y for |y| < kSmall, given y^2: a Chebyshev fit, relative error 1e-7.
  CUKIT_DEVICE static float small_ratio(float square) {
    float value = fmaf(square, -5.66238211e-03f, 2.05935761e-02f);
    value = fmaf(value, square, -5.37220389e-02f);
    value = fmaf(value, square, 1.33311421e-01f);
    value = fmaf(value, square, -3.33332628e-01f);
    return fmaf(value, square, 1.0f);
  }

  CUKIT_DEVICE static float large(float y) {
    const float power = exp2f(-2.0f * kLog2E * fabsf(y));
    return copysignf(__fdividef(1.0f - power, 1.0f + power), y);
  }

  template <int N>
  CUKIT_DEVICE void apply(float (&z)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] *= transform_.scale;
    if (transform_.inverse_cap == 0.0f) return;
    float widest = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) widest = fmaxf(widest, fabsf(z[j]));
    if (widest * transform_.inverse_cap < kSmall) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float y = z[j] * transform_.inverse_cap;
        z[j] *= small_ratio(y * y);
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float y = z[j] * transform_.inverse_cap;
        z[j] = fabsf(y) < kSmall ? z[j] * small_ratio(y * y) : transform_.cap * large(y);
      }
    }
  }

  LogitTransform transform_;
};

}  // namespace cukit
