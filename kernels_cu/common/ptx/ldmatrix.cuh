// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory to registers (sm_75).
//
// Lane i gives the address of row i % 8 of matrix i / 8 (16 bytes, 16-byte aligned). Register j of
// lane l then holds two neighbouring elements of matrix j: row l / 4, columns 2 * (l % 4) and + 1;
// with .trans: column l / 4, rows 2 * (l % 4) and + 1.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// ldmatrix.sync.aligned.m8n8.x4
CUKIT_DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned shared) {
#ifdef CUKIT_EMULATE
  emulator::ldmatrix(r, 4, false, shared);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
#endif
}

// ldmatrix.sync.aligned.m8n8.x4.trans
CUKIT_DEVICE void ldmatrix_x4_trans(unsigned (&r)[4], unsigned shared) {
#ifdef CUKIT_EMULATE
  emulator::ldmatrix(r, 4, true, shared);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
#endif
}

}  // namespace cukit
