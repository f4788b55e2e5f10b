// stmatrix: the inverse of ldmatrix, from registers to shared memory (sm_90).
//
// Lane i gives the address of row i % 8 of matrix i / 8 (16 bytes, 16-byte aligned). Register j of
// lane l holds two neighbouring elements of matrix j: row l / 4, columns 2 * (l % 4) and + 1; with
// .trans: column l / 4, rows 2 * (l % 4) and + 1.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// stmatrix.sync.aligned.m8n8.x4
CUKIT_DEVICE void stmatrix_x4(unsigned shared, const unsigned (&r)[4]) {
#ifdef CUKIT_EMULATE
  emulator::stmatrix(r, 4, false, shared);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// stmatrix.sync.aligned.m8n8.x4.trans
CUKIT_DEVICE void stmatrix_x4_trans(unsigned shared, const unsigned (&r)[4]) {
#ifdef CUKIT_EMULATE
  emulator::stmatrix(r, 4, true, shared);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

}  // namespace cukit
