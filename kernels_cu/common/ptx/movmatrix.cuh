// movmatrix (sm_75): transposes an 8x8 matrix of 16-bit elements held by the lanes of a warp.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// movmatrix.sync.aligned.m8n8.trans.b16: lane 4 r + c passes elements 2 c and 2 c + 1 of row r, and
// receives elements 2 c and 2 c + 1 of column r.
CUKIT_DEVICE unsigned transpose_8x8(unsigned pair) {
#ifdef CUKIT_EMULATE
  return emulator::movmatrix(pair);
#else
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(pair));
  return transposed;
#endif
}

}  // namespace cukit
