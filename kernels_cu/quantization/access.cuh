// Loads and stores of vectors of values and of codes, at any alignment.
//
// Macros: those of common/quant/codes.cuh and common/types.cuh; ALIGNED 0|1: every vector is
//   aligned to its size and ends within its row.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/store_global.cuh"
#include "common/quant/codes.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kValues = 16 / sizeof(element_t);  // per vector
constexpr int kCodeBytes = kValues / kCodesPerByte;

using Values = Vec<element_t, kValues>;
using Codes = Vec<CodeGroup, kValues / kGroup>;

// Loads up to `count` values starting at `x`; the rest are 0.
CUKIT_DEVICE Values load_values(const element_t* x, long long count) {
  Values values;
  if constexpr (ALIGNED) {
    if (count > 0) {
      load(values, x);
      return values;
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = !ALIGNED && i < count ? x[i] : from_float<element_t>(0.0f);
  }
  return values;
}

// Stores up to `count` values starting at `x`.
CUKIT_DEVICE void store_values(element_t* x, const float (&values)[kValues], long long count) {
  Values rounded;
  from_floats(rounded, values);
  if constexpr (ALIGNED) {
    if (count > 0) {
      store_global_16(reinterpret_cast<uint4*>(x), *reinterpret_cast<const uint4*>(&rounded));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i < count) x[i] = rounded[i];
    }
  }
}

// Integer codes are 0 unless `finite`.
CUKIT_DEVICE Codes encode_values(const float (&x)[kValues], bool finite = true) {
  const unsigned kept = kFloatCodes || finite ? ~0u : 0u;
  Codes codes;
#pragma unroll
  for (int i = 0; i < kValues / kGroup; ++i) {
    codes[i] = static_cast<CodeGroup>(encode_group(x + i * kGroup) & kept);
  }
  return codes;
}

CUKIT_DEVICE void decode_values(float (&x)[kValues], const Codes& codes) {
#pragma unroll
  for (int i = 0; i < kValues / kGroup; ++i) decode_group(x + i * kGroup, codes[i]);
}

// Stores the codes of up to `count` values starting at `storage`; unused codes of the last byte are
// 0.
CUKIT_DEVICE void store_codes(unsigned char* storage, const Codes& codes, long long count) {
  if constexpr (ALIGNED) {
    if (count > 0) store(reinterpret_cast<CodeGroup*>(storage), codes);
  } else {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(&codes);
#pragma unroll
    for (int i = 0; i < kCodeBytes; ++i) {
      const long long left = count - i * kCodesPerByte;  // codes from this byte on
      if (left > 0) storage[i] = left < kCodesPerByte ? bytes[i] & kCodeMask : bytes[i];
    }
  }
}

// Loads the codes of up to `count` values starting at `storage`; the rest are 0.
CUKIT_DEVICE Codes load_codes(const unsigned char* storage, long long count) {
  Codes codes = {};
  if constexpr (ALIGNED) {
    if (count > 0) load(codes, reinterpret_cast<const CodeGroup*>(storage));
  } else {
    unsigned char* bytes = reinterpret_cast<unsigned char*>(&codes);
#pragma unroll
    for (int i = 0; i < kCodeBytes; ++i) {
      if (i * kCodesPerByte < count) bytes[i] = storage[i];
    }
  }
  return codes;
}

}  // namespace cukit
