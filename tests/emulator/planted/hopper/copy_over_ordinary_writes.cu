// A bulk copy overwrites a row written by ordinary stores, without a proxy fence in between.
//
// launch: block=64, shared=256
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: missing fence.proxy.async: write of 256 bytes
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void copy_over_ordinary_writes(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
  __shared__ cukit::Mbarrier full;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  row[threadIdx.x] = 0.0f;
#if !BROKEN
  cukit::fence_proxy_async();
#endif
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, 256);
    cukit::bulk_load(row, x, 256, &full);  // <- reported
  }
  cukit::mbarrier_wait(&full, 0);
  out[threadIdx.x] = row[threadIdx.x];
}
