// Threads arrive at an mbarrier before the writes that their arrival should publish.
//
// launch: block=64
// arg: np.zeros(64, np.float32)
// result: np.arange(63, -1, -1)
// report: race|uninitialised
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void arrives_before_it_writes(float* out) {
  __shared__ cukit::Mbarrier barrier;
  __shared__ float row[64];
  if (threadIdx.x == 0) cukit::mbarrier_init(&barrier, 64);
  __syncthreads();
#if BROKEN
  cukit::mbarrier_arrive(&barrier);
#endif
  row[threadIdx.x] = threadIdx.x;
#if !BROKEN
  cukit::mbarrier_arrive(&barrier);
#endif
  cukit::mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = row[63 - threadIdx.x];
}
