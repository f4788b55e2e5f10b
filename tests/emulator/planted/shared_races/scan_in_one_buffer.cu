// A scan by doubling updates one row in place, without a barrier between the reads and the writes
// of a step.
//
// launch: block=64
// arg: np.ones(64, np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64) + 1
// report: race: (read|write) of 4 bytes
extern "C" __global__ void scan_in_one_buffer(const float* x, float* out) {
  __shared__ float row[64];
  const int t = threadIdx.x;
  row[t] = x[t];
  __syncthreads();
  for (int step = 1; step < 64; step *= 2) {
    const float other = t >= step ? row[t - step] : 0.0f;  // <- reported
#if !BROKEN
    __syncthreads();
#endif
    row[t] += other;  // <- reported
    __syncthreads();
  }
  out[t] = row[t];
}
