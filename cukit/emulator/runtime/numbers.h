// Conversion of the tensor cores' element types to float.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/emulator/instructions.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace cukit::emulator {

inline float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A small float of `exponent_bits` and `mantissa_bits`, without its sign. Subnormals are computed
// from integers, since the CPU is set to flush subnormal floats (launch.cpp).
inline float small_float(unsigned bits, int exponent_bits, int mantissa_bits) {
  const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
  const unsigned exponent = bits >> mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == 0) {
    return static_cast<float>(mantissa) * as_float(static_cast<unsigned>(128 - bias - mantissa_bits) << 23);
  }
  return as_float((exponent + 127 - static_cast<unsigned>(bias)) << 23 | mantissa << (23 - mantissa_bits));
}

inline float from_half(std::uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const unsigned rest = bits & 0x7fffu;
  std::uint32_t magnitude;
  if (rest >= 0x7c00u) {
    magnitude = 0x7f800000u | (rest & 0x3ffu) << 13;
  } else {
    const float value = small_float(rest, 5, 10);
    std::memcpy(&magnitude, &value, sizeof value);
  }
  return as_float(sign | magnitude);
#endif
}

inline float from_float8(std::uint8_t bits, Number type) {
  const unsigned rest = bits & 0x7fu;
  const float nan = as_float(0x7fc00000u);
  float value;
  if (type == Number::E4M3) {
    value = rest == 0x7fu ? nan : small_float(rest, 4, 3);
  } else {
    value = rest > 0x7cu ? nan : rest == 0x7cu ? as_float(0x7f800000u) : small_float(rest, 5, 2);
  }
  return bits & 0x80u ? -value : value;
}

inline unsigned bytes_of(Number type) {
  switch (type) {
    case Number::F16:
    case Number::BF16: return 2;
    case Number::TF32: return 4;
    default: return 1;
  }
}

inline bool is_integer(Number type) { return type == Number::S8 || type == Number::U8; }

// Element `i` of a row of elements. Eight-bit integers and their products are exact as floats.
inline float element(const unsigned char* row, unsigned i, Number type) {
  switch (type) {
    case Number::F16: {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * i, 2);
      return from_half(bits);
    }
    case Number::BF16: {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * i, 2);
      return as_float(static_cast<std::uint32_t>(bits) << 16);
    }
    case Number::TF32: {
      std::uint32_t bits;
      std::memcpy(&bits, row + 4 * i, 4);
      return as_float(bits & 0xffffe000u);
    }
    case Number::S8: return static_cast<float>(static_cast<std::int8_t>(row[i]));
    case Number::U8: return static_cast<float>(row[i]);
    default: return from_float8(row[i], type);
  }
}

}  // namespace cukit::emulator
