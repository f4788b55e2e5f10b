// What all lanes of a warp know alike.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// `value`, which every lane holds: now the compiler knows that too. Loops that it bounds are then
// loops of the warp, and what they count can live in uniform registers, as descriptors have to.
CUKIT_DEVICE int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// The same of an operand's descriptor, whose high word is a constant. The compiler cannot work it out
// anew, from the block's place in its cluster, wherever it is used: that takes as long as a wgmma.
CUKIT_DEVICE unsigned long long uniform_descriptor(unsigned long long descriptor) {
  const int low = warp_uniform(static_cast<int>(descriptor));
  return (descriptor >> 32 << 32) + static_cast<unsigned>(low);
}

// The same of a struct of ints that all lanes read from one place: it then lies in uniform registers,
// where TMA and wgmma expect their operands.
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
