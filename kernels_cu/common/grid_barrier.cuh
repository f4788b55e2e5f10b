// A barrier of all blocks of a launch that run at one time (a cooperative launch).
#pragma once

#include "common/platform.cuh"
#include "common/ptx/global_order.cuh"

namespace cukit {

// What the threads of any block wrote before is visible to all of them after. `arrivals`: two zeros, which
// are zeros again when all blocks have passed; once a launch.
struct GridBarrier {
  int* arrivals;

  // All threads, which may do other work until wait().
  CUKIT_DEVICE void arrive() const {
    __syncthreads();
    if (threadIdx.x == 0) add_release(arrivals, 1);
  }

  // All threads.
  CUKIT_DEVICE void wait() const {
    const int blocks = gridDim.x;
    if (threadIdx.x == 0) {
      while (load_acquire(arrivals) != blocks) {
      }
      if (atomicAdd(arrivals + 1, 1) == blocks - 1) {
        arrivals[0] = 0;
        arrivals[1] = 0;
      }
    }
    __syncthreads();
  }
};

}  // namespace cukit
