// tanh.approx.f32: one instruction of the special-function unit (sm_75).
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Relative error at most 2^-11.
CUKIT_DEVICE float tanh_approximate(float x) {
#ifdef CUKIT_EMULATE
  return tanhf(x);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace cukit
