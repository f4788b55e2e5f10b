// Two bulk copies use one buffer; after the second, the wait is for the phase of the first.
//
// launch: block=64, shared=1024
// arg: np.arange(512, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: 2 * np.arange(64) + 256
// report: asynchronous copy not waited for: read of 4 bytes|deadlock
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void bulk_copy_wait_for_the_previous_phase(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  __shared__ cukit::Mbarrier full;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) {
      cukit::mbarrier_arrive_expect(&full, 1024);
      cukit::bulk_load(row, x + 256 * round, 1024, &full);
    }
    __syncthreads();
    cukit::mbarrier_wait(&full, BROKEN ? 0 : round % 2);
    sum += row[threadIdx.x];
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}
