// fence.proxy.async on sm_80; it requires sm_90.
//
// launch: block=32
// options: arch="sm_80" if BROKEN else "sm_90"
// arg: np.zeros(32, np.float32)
// result: np.ones(32)
// report: missing instruction: sm_80 has no fence.proxy.async, which exists from sm_90 on
// report: thread \(0, 0, 0\)
#include "common/ptx/tma.cuh"

extern "C" __global__ void proxy_fence(float* out) {
  cukit::fence_proxy_async();  // <- reported
  out[threadIdx.x] = 1.0f;
}
