// The mbarrier that releases a pipeline stage expects one arrival, but two warps read the stage.
//
// launch: block=96, shared=256
// arg: np.arange(128, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: 2 * np.arange(64) + 64
// report: race|mbarrier: more arrivals|not waited for|deadlock
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void stage_released_by_one_warp(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, stage);  // 64 floats
  __shared__ cukit::Mbarrier full, empty;
  const int t = threadIdx.x;
  if (t == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::mbarrier_init(&empty, BROKEN ? 1 : 2);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (t >= 64) {
    if (t > 64) return;
    for (int round = 0; round < 2; ++round) {
      if (round > 0) cukit::mbarrier_wait(&empty, 0);
      cukit::mbarrier_arrive_expect(&full, 256);
      cukit::bulk_load(stage, x + 64 * round, 256, &full);
    }
    return;
  }
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    cukit::mbarrier_wait(&full, round);
    sum += stage[t];
    __syncwarp();
    if (t % 32 == 0) cukit::mbarrier_arrive(&empty);
  }
  out[t] = sum;
}
