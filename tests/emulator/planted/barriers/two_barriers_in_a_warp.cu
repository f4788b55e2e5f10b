// The lanes of a warp wait at different barriers; a GPU may release both or none.
//
// launch: block=64
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(63, -1, -1)
// report: threads of one warp wait at different __syncthreads
extern "C" __global__ void two_barriers_in_a_warp(const float* x, float* out) {
  __shared__ float row[64];
  const int t = threadIdx.x;
  row[t] = x[t];
#if BROKEN
  if (t % 2 == 0) {
    __syncthreads();  // <- reported
  } else {
    __syncthreads();  // <- reported
  }
#else
  __syncthreads();
#endif
  out[t] = row[63 - t];
}
