// All threads arrive at an mbarrier that is initialised for one arrival.
//
// launch: block=64
// arg: np.zeros(64, np.float32)
// result: np.ones(64)
// report: mbarrier: more arrivals in a phase|race|uninitialised
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void mbarrier_of_too_few(float* out) {
  __shared__ cukit::Mbarrier barrier;
  __shared__ float row[64];
  if (threadIdx.x == 0) cukit::mbarrier_init(&barrier, BROKEN ? 1 : 64);
  __syncthreads();
  row[threadIdx.x] = 1.0f;
  cukit::mbarrier_arrive(&barrier);
  cukit::mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = row[63 - threadIdx.x];
}
