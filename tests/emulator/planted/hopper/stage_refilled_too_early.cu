// A producer refills pipeline stages without waiting until the consumers have read them.
//
// launch: block=96, shared=512
// arg: np.arange(256, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: 4 * np.arange(64) + 384
// report: race: (write of 256|read of 4) bytes|asynchronous copy not waited for: write of 256
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

extern "C" __global__ void stage_refilled_too_early(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, stages);  // two stages of 64 floats
  __shared__ cukit::Mbarrier full[2], empty[2];
  const int t = threadIdx.x;
  if (t == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      cukit::mbarrier_init(&full[stage], 1);
      cukit::mbarrier_init(&empty[stage], 64);
    }
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (t >= 64) {
    if (t > 64) return;
    for (int round = 0; round < 4; ++round) {
      const int stage = round % 2;
#if !BROKEN
      if (round >= 2) cukit::mbarrier_wait(&empty[stage], 0);
#endif
      cukit::mbarrier_arrive_expect(&full[stage], 256);
      cukit::bulk_load(stages + 64 * stage, x + 64 * round, 256, &full[stage]);
    }
    return;
  }
  float sum = 0.0f;
  for (int round = 0; round < 4; ++round) {
    const int stage = round % 2;
    cukit::mbarrier_wait(&full[stage], round / 2);
    sum += stages[64 * stage + t];
    cukit::mbarrier_arrive(&empty[stage]);
  }
  out[t] = sum;
}
