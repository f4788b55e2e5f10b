// Rings of shared-memory stages between a producer and its consumers.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"

namespace cukit {

// A stage is full when the producer's bytes have landed, empty when every consumer has read it.
template <int Stages>
struct Ring {
  Mbarrier full[Stages];
  Mbarrier empty[Stages];
};

// Where a warp is in a ring: its stage, and the parity of the round.
template <int Stages>
struct Cursor {
  int stage = 0;
  unsigned parity = 0;

  CUKIT_DEVICE void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace cukit
