// {min,max}.{f16x2,bf16x2}: element-wise, on registers of two 16-bit elements (sm_80).
#pragma once

#include "common/platform.cuh"
#include "common/ptx/pack.cuh"

namespace cukit {

// Element by element; if one operand is NaN the result is the other.
template <typename T>
CUKIT_DEVICE unsigned min_packed(unsigned a, unsigned b);
template <typename T>
CUKIT_DEVICE unsigned max_packed(unsigned a, unsigned b);

#ifdef CUKIT_EMULATE

template <typename T>
CUKIT_DEVICE unsigned min_packed(unsigned a, unsigned b) {
  float left[2], right[2];
  unpack<T>(left, a);
  unpack<T>(right, b);
  return pack<T>(fminf(left[0], right[0]), fminf(left[1], right[1]));
}

template <typename T>
CUKIT_DEVICE unsigned max_packed(unsigned a, unsigned b) {
  float left[2], right[2];
  unpack<T>(left, a);
  unpack<T>(right, b);
  return pack<T>(fmaxf(left[0], right[0]), fmaxf(left[1], right[1]));
}

#else

template <>
CUKIT_DEVICE unsigned min_packed<__half>(unsigned a, unsigned b) {
  unsigned smaller;
  asm("min.f16x2 %0, %1, %2;\n" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

template <>
CUKIT_DEVICE unsigned min_packed<__nv_bfloat16>(unsigned a, unsigned b) {
  unsigned smaller;
  asm("min.bf16x2 %0, %1, %2;\n" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

template <>
CUKIT_DEVICE unsigned max_packed<__half>(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.f16x2 %0, %1, %2;\n" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

template <>
CUKIT_DEVICE unsigned max_packed<__nv_bfloat16>(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.bf16x2 %0, %1, %2;\n" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

#endif

}  // namespace cukit
