// Threads without work exit without arriving at an mbarrier.
//
// launch: block=64
// arg: np.zeros(64, np.float32)
// result: np.where(np.arange(64) < 40, 1, 0)
// report: deadlock
// report: is missing 24 of 64 arrivals and 0 bytes of copies in its phase 0; threads 0-39 have arrived
// report: threads 40-63 have exited
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void exit_without_the_arrival(float* out) {
  __shared__ cukit::Mbarrier barrier;
  if (threadIdx.x == 0) cukit::mbarrier_init(&barrier, 64);
  __syncthreads();
  if (threadIdx.x >= 40) {
#if !BROKEN
    cukit::mbarrier_arrive(&barrier);
#endif
    return;
  }
  cukit::mbarrier_arrive(&barrier);
  cukit::mbarrier_wait(&barrier, 0);  // <- reported
  out[threadIdx.x] = 1.0f;
}
