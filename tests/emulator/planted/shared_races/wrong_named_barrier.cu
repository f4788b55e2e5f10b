// A producer warp and a consumer warp should meet at one named barrier, but use different ones.
//
// launch: block=64
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// result: np.arange(31, -1, -1)
// report: deadlock|race|uninitialised
#include "common/ptx/warp_group.cuh"

extern "C" __global__ void wrong_named_barrier(const float* x, float* out) {
  __shared__ float row[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    row[lane] = x[lane];
    cukit::named_arrive(1, 64);
  } else {
    cukit::named_sync(BROKEN ? 2 : 1, 64);
    out[lane] = row[31 - lane];
  }
}
