// An endless loop whose body has barriers.
//
// launch: block=64
// options: patience=0.3
// arg: np.zeros(64, np.float32)
// report: no progress
extern "C" __global__ void barriers_for_ever(float* out) {
  __shared__ int round;
  if (threadIdx.x == 0) round = 0;
  __syncthreads();
  while (round < 3) {
    __syncthreads();
    if (threadIdx.x == 0 && !BROKEN) ++round;
    __syncthreads();
  }
  out[threadIdx.x] = 1.0f;
}
