// Threads arrive at an mbarrier that one of them initialises, with no barrier in between.
//
// launch: block=64
// arg: np.zeros(64, np.float32)
// result: np.ones(64)
// report: race: atomic of 8 bytes|not initialised
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void mbarrier_used_at_once(float* out) {
  __shared__ cukit::Mbarrier barrier;
  if (threadIdx.x == 0) cukit::mbarrier_init(&barrier, 64);
#if !BROKEN
  __syncthreads();
#endif
  cukit::mbarrier_arrive(&barrier);  // <- reported
  cukit::mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = 1.0f;
}
