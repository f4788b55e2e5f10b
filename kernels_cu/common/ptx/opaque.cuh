// A value that the compiler knows nothing about.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// No instruction: returns `value`. What is derived from the result is computed after this point,
// every time it is passed; from `value` itself the compiler might derive it once, long before, and
// keep it in registers that a main loop needs.
CUKIT_DEVICE unsigned opaque(unsigned value) {
#ifndef CUKIT_EMULATE
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// The same of an operand's descriptor, whose high word never changes.
CUKIT_DEVICE unsigned long long opaque_descriptor(unsigned long long descriptor) {
  return (descriptor >> 32 << 32) + opaque(static_cast<unsigned>(descriptor));
}

// `value`, but not before `awaited`, which is never below -1, is known: an instruction that is given
// the result stays behind the computation of `awaited`, which the compiler else might put off.
CUKIT_DEVICE unsigned ordered_after(unsigned value, float awaited) {
#ifndef CUKIT_EMULATE
  asm volatile("" : "+f"(awaited));
#endif
  return awaited < -1.0f ? ~value : value;
}

}  // namespace cukit
