// prmt.b32: selects bytes of two words, with all selectors of the instruction. CUDA's __byte_perm
// clears the highest bit of every selector, which costs an instruction and loses sign replication.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Byte i of the result is byte s of `high`:`low`, s being the lower three bits of nibble i of
// `selector` (of which the lower sixteen bits count), or, with the nibble's highest bit, that
// byte's sign.
CUKIT_DEVICE unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
#ifdef CUKIT_EMULATE
  return emulator::permute_bytes(low, high, selector);
#else
  unsigned result;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#endif
}

// The sign of every byte, replicated over its eight bits.
CUKIT_DEVICE unsigned byte_signs(unsigned word) { return permute_bytes(word, 0, 0xba98); }

}  // namespace cukit
