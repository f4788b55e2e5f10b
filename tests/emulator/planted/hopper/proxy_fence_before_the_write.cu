// The proxy fence precedes the stores whose values the bulk copy reads, instead of following them.
//
// launch: block=64, shared=256
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: missing fence.proxy.async: read of 256 bytes
#include "common/ptx/tma.cuh"

extern "C" __global__ void proxy_fence_before_the_write(float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
#if BROKEN
  cukit::fence_proxy_async();
#endif
  row[threadIdx.x] = threadIdx.x;
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
