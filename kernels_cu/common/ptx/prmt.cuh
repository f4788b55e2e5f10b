// prmt.b32: selects bytes of two words, with the instruction's 4-bit selectors. CUDA's __byte_perm
// clears the highest bit of each, which costs an instruction and loses sign replication.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Byte i of the result is byte s of `high`:`low`, where s is the low three bits of nibble i of
// `selector`. If the nibble's highest bit is set, every bit of byte i is the sign bit of byte s.
// The upper sixteen bits of `selector` are ignored.
CUKIT_DEVICE unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
#ifdef CUKIT_EMULATE
  return emulator::permute_bytes(low, high, selector);
#else
  unsigned result;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#endif
}

}  // namespace cukit
