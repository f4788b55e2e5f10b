// The last steps of a reduction in shared memory rely on the lanes of a warp running in lockstep.
//
// launch: block=64
// arg: np.ones(64, np.float32)
// arg: np.zeros(1, np.float32)
// result: [64]
// report: race: (read|write) of 4 bytes
extern "C" __global__ void half_warp_reduction(const float* x, float* out) {
  __shared__ float sums[64];
#if BROKEN
  volatile float* row = sums;
#else
  float* row = sums;
#endif
  const int t = threadIdx.x;
  row[t] = x[t];
  __syncthreads();
  if (t < 32) {
    for (int step = 32; step > 0; step /= 2) {
      const float other = row[t + step];
#if !BROKEN
      __syncwarp();
#endif
      if (t < step) row[t] = row[t] + other;
#if !BROKEN
      __syncwarp();
#endif
    }
  }
  if (t == 0) out[0] = row[0];
}
