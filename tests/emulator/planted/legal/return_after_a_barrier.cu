// One warp continues with barriers after the other warp has returned.
//
// launch: block=64
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(1, np.float32)
// result: [2016]
extern "C" __global__ void return_after_a_barrier(const float* x, float* out) {
  __shared__ float sums[64];
  const int t = threadIdx.x;
  sums[t] = x[t];
  __syncthreads();
  if (t >= 32) return;
  sums[t] += sums[t + 32];
  for (int step = 16; step > 0; step /= 2) {
    __syncthreads();
    if (t < step) sums[t] += sums[t + step];
  }
  if (t == 0) out[0] = sums[0];
}
