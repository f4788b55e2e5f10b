// One thread clears a sum and all threads add to it, without a barrier in between.
//
// launch: block=64
// arg: np.ones(64, np.float32)
// arg: np.zeros(64, np.float32)
// result: np.full(64, 64)
// report: race: (atomic|write) of 4 bytes
extern "C" __global__ void atomic_beside_initialiser(const float* x, float* out) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.0f;  // <- reported
#if !BROKEN
  __syncthreads();
#endif
  atomicAdd(&sum, x[threadIdx.x]);  // <- reported
  __syncthreads();
  out[threadIdx.x] = sum;
}
