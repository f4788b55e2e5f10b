// Two arrays share the dynamic shared memory, and the second starts inside the first.
//
// launch: block=64, shared=512
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64) + np.arange(63, -1, -1)
// report: race: write of 4 bytes at byte \d+ of the dynamic
#include "common/platform.cuh"

extern "C" __global__ void arrays_that_overlap(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, first);  // 2 x 64 floats
  float* second = first + (BROKEN ? 48 : 64);
  const int t = threadIdx.x;
  first[t] = x[t];  // <- reported
  second[t] = x[63 - t];  // <- reported
  __syncthreads();
  out[t] = first[t] + second[t];
}
