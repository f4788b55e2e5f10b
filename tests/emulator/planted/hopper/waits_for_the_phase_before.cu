// A wait on the parity of the phase before the first one returns immediately.
//
// launch: block=64, shared=256
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: asynchronous copy not waited for: read of 4 bytes|uninitialised
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void waits_for_the_phase_before(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 64 floats
  __shared__ cukit::Mbarrier full;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, 256);
    cukit::bulk_load(row, x, 256, &full);
  }
  cukit::mbarrier_wait(&full, BROKEN ? 1 : 0);
  out[threadIdx.x] = row[threadIdx.x];  // <- reported
}
