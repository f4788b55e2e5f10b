// An mbarrier expects more bytes than the copy delivers.
//
// launch: block=64, shared=1024
// arg: np.arange(256, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: deadlock
// report: is missing 0 of 1 arrivals and 256 bytes of copies in its phase 0; threads 0 have arrived
// report: `__shared__ cukit::Mbarrier|mbarrier at shared address
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void mbarrier_short_of_bytes(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  __shared__ cukit::Mbarrier full;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, 1024);
    cukit::bulk_load(row, x, BROKEN ? 768 : 1024, &full);
  }
  cukit::mbarrier_wait(&full, 0);  // <- reported
  out[threadIdx.x] = row[threadIdx.x];
}
