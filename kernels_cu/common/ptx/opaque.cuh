// Values that the compiler must treat as unknown.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Returns `value`; emits no instruction. Expressions of the result are computed after this point
// each time; those of `value` itself the compiler might compute once, long before, and keep in
// registers that a main loop needs.
CUKIT_DEVICE unsigned opaque(unsigned value) {
#ifndef CUKIT_EMULATE
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// The same for an operand's descriptor, whose high word never changes.
CUKIT_DEVICE unsigned long long opaque_descriptor(unsigned long long descriptor) {
  return (descriptor >> 32 << 32) + opaque(static_cast<unsigned>(descriptor));
}

// Returns `value`, ordered after the computation of `awaited`, which is never below -1: an
// instruction that uses the result is not moved above that computation.
CUKIT_DEVICE unsigned ordered_after(unsigned value, float awaited) {
#ifndef CUKIT_EMULATE
  asm volatile("" : "+f"(awaited));
#endif
  return awaited < -1.0f ? ~value : value;
}

}  // namespace cukit
