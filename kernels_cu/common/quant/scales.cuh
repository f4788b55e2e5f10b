// The extremes of a block of values, its scale and zero point. M is the largest code (kMaxCode):
//
//   symmetric      scale = max|x| / M                     code = round(x / scale)
//   zero points    scale = (max(x, 0) - min(x, 0)) / (2 M + 1)
//                  zero point = round(-min(x, 0) / scale) - M - 1
//                  code = round(x / scale + zero point)
//
// Scales and codes are computed with the operations of the reference, so that they agree bit for
// bit: values are multiplied by 1 / scale instead of divided, without fused multiply-add. A scale
// below the smallest normal float32 becomes 1, as for a block of zeros. A NaN or infinity in a
// block makes its scale NaN.
//
// Macros: those of common/quant/codes.cuh and common/types.cuh; SCALE float32|float16|bfloat16;
//   ZERO_POINTS 0|1; POWER_OF_TWO 0|1: scales are rounded up to a power of two.
#pragma once

#include "common/platform.cuh"
#include "common/quant/codes.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

using scale_t = SCALE;

template <typename T>
constexpr float kLargest = 3.40282347e38f;
template <>
constexpr float kLargest<float16> = 65504.0f;
template <>
constexpr float kLargest<bfloat16> = 3.38953139e38f;
constexpr float kSmallestScale = 1.17549435e-38f;  // the smallest normal float
constexpr float kMaxCode = kFormat == Format::E4M3   ? 448.0f
                           : kFormat == Format::E5M2 ? 57344.0f
                                                     : static_cast<float>(kMaxInteger);

// The bits of max|x|; with zero points, those of max(x, 0) and of max(-x, 0). See MaxBits.
struct Extremes {
  static constexpr int kCount = ZERO_POINTS ? 2 : 1;
  int bits[kCount] = {};

  CUKIT_DEVICE void take(float x) {
    const int value = __float_as_int(x);
    if constexpr (ZERO_POINTS) {
      bits[0] = max(bits[0], value);
      bits[1] = max(bits[1], value ^ static_cast<int>(0x80000000u));
    } else {
      bits[0] = max(bits[0], value & 0x7fffffff);
    }
  }

  // Extreme i times `part`, for a clipped range.
  CUKIT_DEVICE float extreme(int i, float part) const { return __int_as_float(bits[i]) * part; }

  CUKIT_DEVICE bool finite() const {
    constexpr int kInfinity = 0x7f800000;
    return bits[0] < kInfinity && bits[kCount - 1] < kInfinity;
  }
};

// Maps a block's values to codes. `scale` is 1 / the block's scale, NaN if a value is not finite.
struct Inverse {
  float scale;
  float zero_point;

  CUKIT_DEVICE bool finite() const { return scale == scale; }

  // The number that is then rounded to a code.
  CUKIT_DEVICE float scaled(float x) const {
    const float multiple = __fmul_rn(x, scale);
    return ZERO_POINTS ? __fadd_rn(multiple, zero_point) : multiple;
  }
};

// A scale as it is stored, and its inverse.
struct Factors {
  scale_t scale;
  Inverse inverse;

  CUKIT_DEVICE float value() const { return to_float(scale); }
};

CUKIT_DEVICE Factors factors_of(const Extremes& extremes, float part = 1.0f) {
  float scale;
  if constexpr (ZERO_POINTS) {
    constexpr float kLevels = 2 * kMaxCode + 1;
    scale = __fadd_rn(extremes.extreme(0, part) / kLevels, extremes.extreme(1, part) / kLevels);
  } else {
    scale = extremes.extreme(0, part) / kMaxCode;
  }
  if constexpr (POWER_OF_TWO) {
    scale = __int_as_float((__float_as_int(scale) + 0x7fffff) & 0x7f800000);
  }
  Factors factors;
  factors.scale = from_float<scale_t>(fminf(scale, kLargest<scale_t>));
  if (factors.value() < kSmallestScale) factors.scale = from_float<scale_t>(1.0f);
  if (!extremes.finite()) factors.scale = from_float<scale_t>(__int_as_float(0x7fc00000));
  factors.inverse = {1.0f / factors.value(), 0.0f};
  if constexpr (ZERO_POINTS) {
    const float steps = rintf(__fmul_rn(extremes.extreme(1, part), factors.inverse.scale));
    const float zero_point = fminf(fmaxf(steps - (kMaxCode + 1), -kMaxCode - 1), kMaxCode);
    if (extremes.finite()) factors.inverse.zero_point = zero_point;
  }
  return factors;
}

// Squared error of rounding x to a code; integer codes only.
CUKIT_DEVICE float squared_error(const Factors& factors, float x) {
  const float code = rintf(fminf(fmaxf(factors.inverse.scaled(x), -kMaxCode - 1), kMaxCode));
  const float error = (code - factors.inverse.zero_point) * factors.value() - x;
  return error * error;
}

}  // namespace cukit
