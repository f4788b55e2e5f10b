// Numbers to the codes of one format, and back; without scales.
//
// Formats: float8 e4m3 (finite) and e5m2, Micikevicius et al., arXiv:2209.05433; int8; int4, two to a
// byte, the first in the low bits. Rounds to nearest, ties to even, saturating. Kernels are
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

// Integer codes go from -kMostInteger - 1 to kMostInteger.
constexpr int kMostInteger = (1 << (kCodeBits - 1)) - 1;

// Codes are made four at a time.
constexpr int kGroup = 4;
using CodeGroup = detail::Word<kGroup / kCodesPerByte>::type;

// NaN becomes 0.
CUKIT_DEVICE unsigned encode_integer(float x) {
  return static_cast<unsigned>(min(max(__float2int_rn(x), -kMostInteger - 1), kMostInteger)) &
         kCodeMask;
}

CUKIT_DEVICE unsigned encode_group(const float* x) {
  if constexpr (kFloatCodes) {
    const unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, kFloat8);
    const unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, kFloat8);
    return low | high << 16;
  } else {
    unsigned codes = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) codes |= encode_integer(x[i]) << (i * kCodeBits);
    return codes;
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
    constexpr int kUnused = 32 - kCodeBits;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      x[i] = static_cast<float>(static_cast<int>(codes << (kUnused - i * kCodeBits)) >> kUnused);
    }
  }
}

}  // namespace cukit
