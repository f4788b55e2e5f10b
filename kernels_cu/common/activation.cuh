// SiLU, GELU, ReLU and the identity, with their derivatives, on float.
//
// SiLU and GELU are x * gate(x) with a gate between 0 and 1. An activation is a type with
//   value(x)
//   value_and_slope(x, &slope)   value(x), and its derivative
// templated on the element type T of the tensor: results rounded to 16 bits get the hardware's fast
// exponential, float32 results the accurate one.
#pragma once

#include "common/platform.cuh"

namespace cukit {

namespace detail {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSqrtHalf = 0.7071067811865476f;
constexpr float kInverseSqrt2Pi = 0.3989422804014327f;

template <typename T>
CUKIT_DEVICE float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);
}

// If exp(-x) overflows to infinity, the quotient is 0, the limit of the sigmoid.
template <typename T>
CUKIT_DEVICE float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + exponential<T>(-x));
}

// The normal density at x, times sqrt(2 pi).
CUKIT_DEVICE float bell(float x) { return exp2f(x * x * (-0.5f * kLog2e)); }

// The normal distribution function, given bell = exp(-x^2 / 2).
//
// With z = |x| / sqrt(2) and t = 1 / (1 + 0.43 z), erfc(z) = exp(-z^2) t P(t), the form of
// Abramowitz and Stegun 7.1.26. P is the polynomial of degree 7 that minimises the largest relative
// error over 0 <= z <= 9.5 (8.5e-8), so that the tail of negative x is accurate too; p below is
// P(t) / 2. In float arithmetic the absolute error is below 2.5e-7; float32 tensors need more
// accuracy and use normcdff.
template <typename T>
CUKIT_DEVICE float normal_cdf(float x, float bell) {
  if constexpr (sizeof(T) == 4) {
    return normcdff(x);
  } else {
    const float t = __fdividef(1.0f, fmaf(0.43f * kSqrtHalf, fabsf(x), 1.0f));
    float p = 0.03686654567718506f;
    p = fmaf(p, t, -0.15524141490459442f);
    p = fmaf(p, t, 0.19195163249969482f);
    p = fmaf(p, t, -0.04295850545167923f);
    p = fmaf(p, t, 0.12347562611103058f);
    p = fmaf(p, t, 0.1024584099650383f);
    p = fmaf(p, t, 0.12219063937664032f);
    p = fmaf(p, t, 0.12125710397958755f);
    const float tail = bell * t * p;
    return x > 0.0f ? 1.0f - tail : tail;
  }
}

// GELU's tanh form: 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kTwiceSqrt2OverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

// For 16-bit results log2(e) is folded into the factors, which saves one of eight instructions.
// Large matrix products are power-limited, and every epilogue instruction draws power.
template <typename T>
CUKIT_DEVICE float tanh_gate(float x) {
  constexpr float kFactor = kTwiceSqrt2OverPi * (sizeof(T) == 4 ? 1.0f : -kLog2e);
  const float product = x * fmaf(kFactor * kCubic, x * x, kFactor);
  return sizeof(T) == 4 ? sigmoid<T>(product) : __fdividef(1.0f, 1.0f + exp2f(product));
}

}  // namespace detail

template <typename T>
struct Silu {
  CUKIT_DEVICE static float value(float x) { return x * detail::sigmoid<T>(x); }
  CUKIT_DEVICE static float value_and_slope(float x, float* slope) {
    const float gate = detail::sigmoid<T>(x);
    const float value = x * gate;
    *slope = gate + value * (1.0f - gate);
    return value;
  }
};

// Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415: x * Phi(x).
template <typename T>
struct GeluErf {
  CUKIT_DEVICE static float value(float x) {
    return x * detail::normal_cdf<T>(x, detail::bell(x));
  }
  CUKIT_DEVICE static float value_and_slope(float x, float* slope) {
    const float bell = detail::bell(x);
    const float gate = detail::normal_cdf<T>(x, bell);
    *slope = fmaf(x * detail::kInverseSqrt2Pi, bell, gate);
    return x * gate;
  }
};

template <typename T>
struct GeluTanh {
  CUKIT_DEVICE static float value(float x) { return x * detail::tanh_gate<T>(x); }
  CUKIT_DEVICE static float value_and_slope(float x, float* slope) {
    const float gate = detail::tanh_gate<T>(x);
    // The gate is 0 or 1 for |x| >= 16. A larger x^2 could overflow, and 0 * inf is NaN.
    const float bounded = fminf(fmaxf(x, -16.0f), 16.0f);
    const float inner = detail::kTwiceSqrt2OverPi *
                        fmaf(3.0f * detail::kCubic, bounded * bounded, 1.0f);
    *slope = fmaf(bounded * gate * (1.0f - gate), inner, gate);
    return x * gate;
  }
};

// NaN stays NaN; the slope at 0 is 0.
template <typename T>
struct Relu {
  CUKIT_DEVICE static float value(float x) { return x < 0.0f ? 0.0f : x; }
  CUKIT_DEVICE static float value_and_slope(float x, float* slope) {
    *slope = x > 0.0f ? 1.0f : 0.0f;
    return value(x);
  }
};

template <typename T>
struct NoActivation {
  CUKIT_DEVICE static float value(float x) { return x; }
  CUKIT_DEVICE static float value_and_slope(float x, float* slope) {
    *slope = 1.0f;
    return x;
  }
};

// -DACTIVATION=Silu|GeluErf|GeluTanh|Relu|NoActivation
#ifdef ACTIVATION
template <typename T>
using activation_t = ACTIVATION<T>;
#endif

}  // namespace cukit
