// Threads arrive at an mbarrier while their cp.async copies are still in flight.
//
// launch: block=64, shared=1024
// arg: np.arange(256, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: 4 * np.arange(63, -1, -1)
// report: asynchronous copy not waited for|uninitialised|race
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/shared_address.cuh"

extern "C" __global__ void ordinary_arrival_for_an_asynchronous_copy(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  __shared__ cukit::Mbarrier full;
  const int t = threadIdx.x;
  if (t == 0) cukit::mbarrier_init(&full, 64);
  __syncthreads();
  cukit::cp_async_16(cukit::shared_address(row + 4 * t), x + 4 * t);
#if BROKEN
  cukit::mbarrier_arrive(&full);
#else
  cukit::cp_async_arrive(&full);
#endif
  cukit::mbarrier_wait(&full, 0);
  out[t] = row[4 * (63 - t)];
}
