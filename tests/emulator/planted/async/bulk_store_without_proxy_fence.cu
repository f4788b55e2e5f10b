// Threads fill a row for a bulk copy, which may read stale data without a proxy fence.
//
// launch: block=64, shared=256
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: missing fence.proxy.async: read of 256 bytes
#include "common/ptx/tma.cuh"

extern "C" __global__ void bulk_store_without_proxy_fence(float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
  row[threadIdx.x] = threadIdx.x;  // <- reported
#if !BROKEN
  cukit::fence_proxy_async();
#endif
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::bulk_store(out, row, 256);  // <- reported
    cukit::bulk_commit();
    cukit::bulk_wait<0>();
  }
}
