// Values that the compiler must treat as unknown.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Returns `value`; emits no instruction. Expressions of the result are computed after this point,
// each time it is reached. Expressions of `value` itself could be hoisted out of a main loop, which
// would then lack the registers that hold them.
CUKIT_DEVICE unsigned opaque(unsigned value) {
#ifndef CUKIT_EMULATE
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// The same for a wgmma operand's descriptor; only its low word, with the address, becomes opaque.
CUKIT_DEVICE unsigned long long opaque_descriptor(unsigned long long descriptor) {
  return (descriptor >> 32 << 32) + opaque(static_cast<unsigned>(descriptor));
}

// Returns `value`, ordered after the computation of `awaited`, which must not be below -1: the
// compiler cannot move an instruction that uses the result above that computation.
CUKIT_DEVICE unsigned ordered_after(unsigned value, float awaited) {
#ifndef CUKIT_EMULATE
  asm volatile("" : "+f"(awaited));
#endif
  return awaited < -1.0f ? ~value : value;
}

}  // namespace cukit
