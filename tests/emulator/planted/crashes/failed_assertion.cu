// An assertion that some threads fail.
//
// launch: block=64
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: the kernel aborted: assert\(x\[threadIdx.x\] < kMax\)
// report: thread \(40, 0, 0\)
#ifndef __CUDACC_RTC__  // NVRTC defines assert
#include <cassert>
#endif

constexpr float kMax = BROKEN ? 40.0f : 64.0f;

extern "C" __global__ void failed_assertion(const float* x, float* out) {
  assert(x[threadIdx.x] < kMax);  // <- reported
  out[threadIdx.x] = x[threadIdx.x];
}
