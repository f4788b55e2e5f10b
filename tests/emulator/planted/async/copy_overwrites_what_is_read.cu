// The copy for the next round starts while threads still read the current row.
//
// launch: block=64, shared=1024
// arg: np.arange(512, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: 4 * np.arange(63, -1, -1) * 2 + 256
// report: race: (write of 16|read of 4) bytes
#include "common/ptx/cp_async.cuh"
#include "common/ptx/shared_address.cuh"

extern "C" __global__ void copy_overwrites_what_is_read(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  const int t = threadIdx.x;
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    cukit::cp_async_16(cukit::shared_address(row + 4 * t), x + 256 * round + 4 * t);  // <- reported
    cukit::cp_async_commit();
    cukit::cp_async_wait<0>();
    __syncthreads();
    sum += row[4 * (63 - t)];  // <- reported
#if !BROKEN
    __syncthreads();
#endif
  }
  out[t] = sum;
}
