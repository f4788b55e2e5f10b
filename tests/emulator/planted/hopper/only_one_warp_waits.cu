// One warp waits for the copy; the other reads the data without waiting.
//
// launch: block=64, shared=256
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: asynchronous copy not waited for|uninitialised
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void only_one_warp_waits(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
  __shared__ cukit::Mbarrier full;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, 256);
    cukit::bulk_load(row, x, 256, &full);
  }
  if (!BROKEN || threadIdx.x < 32) cukit::mbarrier_wait(&full, 0);
  out[threadIdx.x] = row[threadIdx.x];  // <- reported
}
