// A row loaded with cp.async is read before the thread has waited for its copies.
//
// launch: block=64, shared=1024
// arg: np.arange(256, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: 4 * np.arange(63, -1, -1)
// report: asynchronous copy not waited for: read of 4 bytes at byte \d+ of the dynamic
#include "common/ptx/cp_async.cuh"
#include "common/ptx/shared_address.cuh"

extern "C" __global__ void copy_not_waited_for(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  cukit::cp_async_16(cukit::shared_address(row + 4 * threadIdx.x), x + 4 * threadIdx.x);
  cukit::cp_async_commit();
#if !BROKEN
  cukit::cp_async_wait<0>();
#endif
  __syncthreads();
  out[threadIdx.x] = row[4 * (63 - threadIdx.x)];  // <- reported
}
