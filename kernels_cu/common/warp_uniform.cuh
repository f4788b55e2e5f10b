// Warp-uniform values.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Returns `value`, which all lanes hold, and tells the compiler that it is warp-uniform. Loops
// bounded by it are then uniform, and their counters can be in uniform registers, as descriptors
// must be.
CUKIT_DEVICE int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// The same for an operand's descriptor, whose high word is a constant. It also keeps the compiler
// from recomputing the descriptor from the block's rank in its cluster at each use, which takes as
// long as a wgmma.
CUKIT_DEVICE unsigned long long uniform_descriptor(unsigned long long descriptor) {
  const int low = warp_uniform(static_cast<int>(descriptor));
  return (descriptor >> 32 << 32) + static_cast<unsigned>(low);
}

// The same for a struct of ints that all lanes read from one address: it is then in uniform
// registers, where TMA and wgmma expect their operands.
template <typename Ints>
CUKIT_DEVICE Ints warp_uniform_ints(const Ints& ints) {
  static_assert(sizeof(Ints) % sizeof(int) == 0, "nothing but int");
  Ints own;
#pragma unroll
  for (unsigned i = 0; i < sizeof(Ints) / sizeof(int); ++i) {
    reinterpret_cast<int*>(&own)[i] = warp_uniform(reinterpret_cast<const int*>(&ints)[i]);
  }
  return own;
}

}  // namespace cukit
