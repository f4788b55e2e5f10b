// Conversion of numbers to the codes of one format, and back; without scales.
//
// Formats: float8 e4m3 (finite) and e5m2, Micikevicius et al., arXiv:2209.05433; int8; int4, two
// per byte, the first in the low bits. Rounds to nearest, ties to even, saturating. Kernels are
// specialised by -DFORMAT=E4M3|E5M2|INT8|INT4.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"

#include <cuda_fp8.h>

namespace cukit {

enum class Format { E4M3, E5M2, INT8, INT4 };

constexpr Format kFormat = Format::FORMAT;
constexpr bool kFloatCodes = kFormat == Format::E4M3 || kFormat == Format::E5M2;
constexpr __nv_fp8_interpretation_t kFloat8 = kFormat == Format::E4M3 ? __NV_E4M3 : __NV_E5M2;
constexpr int kCodeBits = kFormat == Format::INT4 ? 4 : 8;
constexpr int kCodesPerByte = 8 / kCodeBits;
constexpr unsigned kCodeMask = (1u << kCodeBits) - 1;

// Integer codes go from -kMaxInteger - 1 to kMaxInteger.
constexpr int kMaxInteger = (1 << (kCodeBits - 1)) - 1;

// Codes are computed four at a time.
constexpr int kGroup = 4;
using CodeGroup = detail::Word<kGroup / kCodesPerByte>::type;

namespace detail {

// 1.5 * 2^23: floats of this magnitude are integers, so that adding it rounds to an integer, half
// to even, in the lowest bits of the sum. Conversion instructions have an eighth of the throughput.
constexpr float kRoundingOffset = 12582912.0f;
constexpr unsigned kRoundingOffsetBits = 0x4b400000u;

// A 1 in each of the four codes of a group.
constexpr unsigned kOnes = kCodeBits == 8 ? 0x01010101u : 0x1111u;
constexpr unsigned kSigns = kOnes << (kCodeBits - 1);

}  // namespace detail

// x, or for integer codes 0 instead of NaN.
CUKIT_DEVICE float without_nan(float x) { return kFloatCodes || x == x ? x : 0.0f; }

// Integer codes of NaN are unspecified: see without_nan.
CUKIT_DEVICE unsigned encode_group(const float* x) {
  if constexpr (kFloatCodes) {
    const unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, kFloat8);
    const unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, kFloat8);
    return low | high << 16;
  } else {
    // Codes are offset to 0 ... 2^bits - 1, so that the sum of the shifted floats contains them
    // side by side, and the constant bits of all floats are subtracted at once. Flipping the sign
    // bits removes the offset.
    constexpr float kLow = -kMaxInteger - 1, kRaised = detail::kRoundingOffset + kMaxInteger + 1;
    unsigned sum = 0u - detail::kRoundingOffsetBits * detail::kOnes;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float inside = fminf(fmaxf(x[i], kLow), static_cast<float>(kMaxInteger));
      sum += __float_as_uint(__fadd_rn(inside, kRaised)) << (i * kCodeBits);
    }
    return sum ^ detail::kSigns;
  }
}

CUKIT_DEVICE void decode_group(float* x, unsigned codes) {
  if constexpr (kFloatCodes) {
#pragma unroll
    for (int i = 0; i < kGroup; i += 2) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> (i * kCodeBits));
      const float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kFloat8)));
      x[i] = both.x, x[i + 1] = both.y;
    }
  } else {
    constexpr float kRaised = detail::kRoundingOffset + kMaxInteger + 1;
    const unsigned raised = codes ^ detail::kSigns;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const unsigned code = raised >> (i * kCodeBits) & kCodeMask;
      x[i] = __uint_as_float(detail::kRoundingOffsetBits | code) - kRaised;
    }
  }
}

}  // namespace cukit
