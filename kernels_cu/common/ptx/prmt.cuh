// prmt.b32: bytes of two words by number, with all the forms of the instruction. CUDA's __byte_perm
// clears the highest bit of every selector, which takes an instruction and loses the replicated sign.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Byte i of the result is byte s of `high`:`low`, s being the lower three bits of nibble i of `selector`
// (of which the lower sixteen bits count), or, with the nibble's highest bit, that byte's sign.
CUKIT_DEVICE unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
#ifdef CUKIT_EMULATE
  return emulator::permute_bytes(low, high, selector);
#else
  unsigned result;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#endif
}

// Every byte's sign, eight times.
CUKIT_DEVICE unsigned byte_signs(unsigned word) { return permute_bytes(word, 0, 0xba98); }

}  // namespace cukit
