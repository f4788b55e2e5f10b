// One thread publishes a value in every round, without a barrier before the next round's value.
//
// launch: block=64
// arg: np.arange(4, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.full(64, 6)
// report: race: write of 4 bytes at byte 0 .*`__shared__ float shared`
extern "C" __global__ void broadcast_in_a_loop(const float* x, float* out) {
  __shared__ float shared;
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x == 0) shared = x[i];  // <- reported
    __syncthreads();
    sum += shared;  // <- reported
#if !BROKEN
    __syncthreads();
#endif
  }
  out[threadIdx.x] = sum;
}
