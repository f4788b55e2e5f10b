// Sums that end between 0 and 1 in one instruction; the compiler makes two of __saturatef(fmaf()).
#pragma once

#include "common/platform.cuh"

namespace cukit {

// a * b + c, at least 0 and at most 1; 0 for NaN.
CUKIT_DEVICE float saturated_fma(float a, float b, float c) {
#ifdef CUKIT_EMULATE
  return __saturatef(fmaf(a, b, c));
#else
  float sum;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
#endif
}

}  // namespace cukit
