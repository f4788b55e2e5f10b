// Stages of shared memory that go round between the copy engine and the warps that read them.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"

namespace cukit {

// `full`: a stage's bytes have come. `empty`: all its readers are through with it.
template <int Stages>
struct Ring {
  Mbarrier full[Stages];
  Mbarrier empty[Stages];

  // One thread, before a barrier of the block and fence_mbarrier_init.
  CUKIT_DEVICE void init(int readers, int writers = 1) {
    for (int stage = 0; stage < Stages; ++stage) {
      mbarrier_init(&full[stage], writers);
      mbarrier_init(&empty[stage], readers);
    }
  }
};

// Where a warp is in a ring: the stage, and the parity of the round.
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

// A warp, one of the readers, is through with a stage.
template <int Stages>
CUKIT_DEVICE void release(Ring<Stages>& ring, const Cursor<Stages>& at) {
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&ring.empty[at.stage]);
}

}  // namespace cukit
