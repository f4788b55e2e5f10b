// Two rows alternate; the wait does not cover the bulk group that reads the row written next.
//
// launch: block=64, shared=512
// arg: np.zeros(256, np.float32)
// result: np.arange(256)
// report: race: write of 4 bytes
#include "common/ptx/tma.cuh"

extern "C" __global__ void store_of_the_newest_group(float* out) {
  CUKIT_DYNAMIC_SHARED(float, rows);  // two rows of 64 floats
  for (int round = 0; round < 4; ++round) {
    float* row = rows + 64 * (round % 2);
    row[threadIdx.x] = 64 * round + threadIdx.x;  // <- reported
    cukit::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      cukit::bulk_store(out + 64 * round, row, 256);
      cukit::bulk_commit();
      cukit::bulk_wait_read<BROKEN ? 2 : 1>();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) cukit::bulk_wait<0>();
}
