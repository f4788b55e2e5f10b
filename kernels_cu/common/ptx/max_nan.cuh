// max.NaN.f32: the larger of two floats, NaN if either is NaN (PTX ISA 7.0, sm_80).
#pragma once

#include "common/platform.cuh"

namespace cukit {

CUKIT_DEVICE float max_nan(float a, float b) {
#ifdef CUKIT_EMULATE
  return a != a ? a : b != b ? b : fmaxf(a, b);
#else
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#endif
}

}  // namespace cukit
