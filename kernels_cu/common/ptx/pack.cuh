// cvt.rn.{f16x2,bf16x2}.f32: two floats to a register of two 16-bit elements (sm_80).
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Rounds to nearest even; `low` goes to the lower address.
template <typename T>
CUKIT_DEVICE unsigned pack(float low, float high);

// cvt.rn.f16x2.f32
template <>
CUKIT_DEVICE unsigned pack<__half>(float low, float high) {
#ifdef CUKIT_EMULATE
  return emulator::bit_cast<unsigned>(__floats2half2_rn(low, high));
#else
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// cvt.rn.bf16x2.f32
template <>
CUKIT_DEVICE unsigned pack<__nv_bfloat16>(float low, float high) {
#ifdef CUKIT_EMULATE
  return emulator::bit_cast<unsigned>(__floats2bfloat162_rn(low, high));
#else
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// The inverse conversion, exact.
template <typename T>
CUKIT_DEVICE void unpack(float (&to)[2], unsigned packed);

template <>
CUKIT_DEVICE void unpack<__half>(float (&to)[2], unsigned packed) {
  to[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(packed & 0xffffu)));
  to[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(packed >> 16)));
}

template <>
CUKIT_DEVICE void unpack<__nv_bfloat16>(float (&to)[2], unsigned packed) {
  to[0] = __uint_as_float(packed << 16);
  to[1] = __uint_as_float(packed & 0xffff0000u);
}

}  // namespace cukit
