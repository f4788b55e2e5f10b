// One lane arrives for its warp; no __syncwarp orders the other lanes' writes before the arrival.
//
// launch: block=64
// arg: np.zeros(64, np.float32)
// result: np.arange(63, -1, -1)
// report: race|uninitialised
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void one_lane_arrives_for_its_warp(float* out) {
  __shared__ cukit::Mbarrier barrier;
  __shared__ float row[64];
  if (threadIdx.x == 0) cukit::mbarrier_init(&barrier, 2);
  __syncthreads();
  row[threadIdx.x] = threadIdx.x;
#if !BROKEN
  __syncwarp();
#endif
  if (threadIdx.x % 32 == 0) cukit::mbarrier_arrive(&barrier);
  cukit::mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = row[63 - threadIdx.x];
}
