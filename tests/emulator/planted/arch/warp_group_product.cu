// wgmma on sm_100; only sm_90a has it.
//
// launch: block=128
// options: arch="sm_100" if BROKEN else "sm_90"
// arg: np.zeros(128, np.float32)
// result: np.ones(128)
// report: missing instruction: sm_100 has no wgmma.fence, which exists only on sm_90a
#include "common/ptx/wgmma.cuh"

extern "C" __global__ void warp_group_product(float* out) {
  cukit::wgmma_fence();  // <- reported
  out[threadIdx.x] = 1.0f;
}
