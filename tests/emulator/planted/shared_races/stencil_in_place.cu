// A row is smoothed in place: neighbours may be overwritten before they are read.
//
// launch: block=64
// arg: np.ones(64, np.float32)
// arg: np.zeros(64, np.float32)
// report: race: (read|write) of 4 bytes
extern "C" __global__ void stencil_in_place(const float* x, float* out) {
  __shared__ float row[66];
  const int t = threadIdx.x;
  row[t + 1] = x[t];
  if (t < 2) row[65 * t] = 0.0f;
  __syncthreads();
  const float smooth = row[t] + row[t + 1] + row[t + 2];  // <- reported
#if !BROKEN
  __syncthreads();
#endif
  row[t + 1] = smooth;  // <- reported
  __syncthreads();
  out[t] = row[t + 1];
}
