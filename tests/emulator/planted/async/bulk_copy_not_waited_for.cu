// A bulk copy signals an mbarrier that its readers do not wait for.
//
// launch: block=64, shared=1024
// arg: np.arange(256, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: asynchronous copy not waited for: read of 4 bytes|uninitialised
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void bulk_copy_not_waited_for(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  __shared__ cukit::Mbarrier full;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, 1024);
    cukit::bulk_load(row, x, 1024, &full);
  }
#if BROKEN
  __syncthreads();
#else
  cukit::mbarrier_wait(&full, 0);
#endif
  out[threadIdx.x] = row[threadIdx.x];  // <- reported
}
