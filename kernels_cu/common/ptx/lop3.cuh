// lop3.b32: a logical function of three words (sm_50).
//
// For the same C++ expression with two constants, ptxas emits two instructions, since an
// instruction has room for one immediate; inline lop3 keeps the other constant in a register.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// (word & mask) | bits
CUKIT_DEVICE unsigned and_or(unsigned word, unsigned mask, unsigned bits) {
#ifdef CUKIT_EMULATE
  return (word & mask) | bits;
#else
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
#endif
}

// (word & mask) ^ bits
CUKIT_DEVICE unsigned and_xor(unsigned word, unsigned mask, unsigned bits) {
#ifdef CUKIT_EMULATE
  return (word & mask) ^ bits;
#else
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;\n" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
#endif
}

}  // namespace cukit
