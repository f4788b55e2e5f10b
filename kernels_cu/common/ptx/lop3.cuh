// lop3.b32: a logical function of three words (sm_50).
//
// Written as C++ operators with two constants it becomes two instructions of the assembler's, since an
// instruction has room for one constant; lop3 keeps the other in a register.
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
