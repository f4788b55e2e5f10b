// Exchanges within a quad, the four lanes that share rows of a tensor-core accumulator tile.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Transposes a 4 x 4 matrix over a quad: lane i sends v[j] to lane j and receives lane j's v[i].
CUKIT_DEVICE void transpose_quad(unsigned (&v)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & distance) continue;
      const bool upper = (lane & distance) != 0;
      const unsigned got = __shfl_xor_sync(kFullMask, upper ? v[j] : v[j + distance], distance);
      v[j] = upper ? got : v[j];
      v[j + distance] = upper ? v[j + distance] : got;
    }
}

}  // namespace cukit
