// Two warps arrive at a named barrier that expects three.
//
// launch: block=96
// arg: np.zeros(1, np.int32)
// report: deadlock
// report: named barrier 1 is missing 32 of 96 arrivals
#include "common/ptx/warp_group.cuh"

extern "C" __global__ void named_barrier_counts_too_many(int* out) {
  if (threadIdx.x < 64) cukit::named_sync(1, BROKEN ? 96 : 64);  // <- reported
  if (threadIdx.x == 0) out[0] = 1;
}
