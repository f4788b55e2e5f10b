// A bulk copy stores a histogram from shared memory; atomics need a proxy fence, as plain stores do.
//
// launch: block=64, shared=256
// arg: np.zeros(64, np.int32)
// result: np.where(np.arange(64) < 32, 2, 0)
// report: missing fence.proxy.async: read of 256 bytes
#include "common/ptx/tma.cuh"

extern "C" __global__ void bulk_store_of_atomics_without_proxy_fence(int* out) {
  CUKIT_DYNAMIC_SHARED(int, bins);  // 64 ints
  bins[threadIdx.x] = 0;
  cukit::fence_proxy_async();
  __syncthreads();
  atomicAdd(&bins[threadIdx.x / 2], 1);  // <- reported
#if !BROKEN
  cukit::fence_proxy_async();
#endif
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::bulk_store(out, bins, 256);  // <- reported
    cukit::bulk_commit();
    cukit::bulk_wait<0>();
  }
}
