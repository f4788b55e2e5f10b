// Philox4x32-10 (Salmon et al., SC 2011): random numbers as a function of a key and a counter.
//
// A number depends only on (seed, step, stream): not on the thread or block that computes it, nor
// on earlier numbers. Reference: cukit/reference/sampling.py, philox_uint64.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// 64 uniform bits of the counter (step, stream, 0) under the key `seed`.
CUKIT_DEVICE unsigned long long philox_uint64(unsigned long long seed, unsigned long long step,
                                              unsigned stream) {
  unsigned c0 = static_cast<unsigned>(step), c1 = static_cast<unsigned>(step >> 32);
  unsigned c2 = stream, c3 = 0;
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<unsigned long long>(c1) << 32 | c0;
}

}  // namespace cukit
