// A wait for bulk groups does not cover a store that was never committed.
//
// launch: block=64, shared=256
// arg: np.zeros(128, np.float32)
// result: np.arange(128)
// report: race: write of 4 bytes|exits before its bulk copies
#include "common/ptx/tma.cuh"

extern "C" __global__ void store_that_was_never_committed(float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
  for (int round = 0; round < 2; ++round) {
    row[threadIdx.x] = 64 * round + threadIdx.x;
    cukit::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      cukit::bulk_store(out + 64 * round, row, 256);
#if !BROKEN
      cukit::bulk_commit();
#endif
      cukit::bulk_wait_read<0>();
    }
    __syncthreads();
  }
}
