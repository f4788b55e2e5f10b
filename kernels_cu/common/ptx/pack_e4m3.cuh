// cvt.rn.satfinite.e4m3x2.f32, cvt.rn.f16x2.e4m3x2: float to e4m3, e4m3 to float16 (sm_89).
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Four floats to a register of e4m3, `x0` at the lowest address. Rounds to nearest even; saturates
// at +-448.
CUKIT_DEVICE unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
#ifdef CUKIT_EMULATE
  const float x[] = {x0, x1, x2, x3};
  unsigned packed = 0;
  for (int i = 0; i < 4; ++i) {
    packed |= unsigned{__nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3)} << (8 * i);
  }
  return packed;
#else
  unsigned packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
#endif
}

// Four e4m3 of a register to two registers of float16, exactly; the lowest address first.
CUKIT_DEVICE void unpack_e4m3(unsigned (&halves)[2], unsigned packed) {
#ifdef CUKIT_EMULATE
  for (int i = 0; i < 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(packed >> (16 * i));
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    halves[i] = unsigned{raw.x} | unsigned{raw.y} << 16;
  }
#else
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(packed));
#endif
}

}  // namespace cukit
