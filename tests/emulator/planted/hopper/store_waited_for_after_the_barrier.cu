// The storing thread waits for its store only after the barrier that lets the others overwrite the row.
//
// launch: block=64, shared=256
// arg: np.zeros(128, np.float32)
// result: np.arange(128)
// report: race: write of 4 bytes
#include "common/ptx/tma.cuh"

extern "C" __global__ void store_waited_for_after_the_barrier(float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
  for (int round = 0; round < 2; ++round) {
    row[threadIdx.x] = 64 * round + threadIdx.x;  // <- reported
    cukit::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      cukit::bulk_store(out + 64 * round, row, 256);
      cukit::bulk_commit();
#if !BROKEN
      cukit::bulk_wait_read<0>();
#endif
    }
    __syncthreads();
    if (threadIdx.x == 0) cukit::bulk_wait_read<0>();
  }
}
