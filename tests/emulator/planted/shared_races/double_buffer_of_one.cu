// A double buffer whose stage index never changes.
//
// launch: block=64
// arg: np.arange(256, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// report: race: (read|write) of 4 bytes
extern "C" __global__ void double_buffer_of_one(const float* x, float* out) {
  __shared__ float stages[2][64];
  const int t = threadIdx.x;
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    const int stage = BROKEN ? 0 : i % 2;
    stages[stage][t] = x[64 * i + t];  // <- reported
    __syncthreads();
    sum += stages[stage][63 - t];  // <- reported
  }
  out[t] = sum;
}
