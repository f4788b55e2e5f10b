// A pointer runs past the end of a shared array, where another array may start.
//
// launch: block=64
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64) + 1
// report: out of bounds: write of 4 bytes at byte \d+ of the static shared memory
// report: 0 bytes past the end of `__shared__ float (first|second)\[64\]`
// report: thread \(63, 0, 0\)
__device__ void store(float* to, int i, float value) {
  to[i] = value;  // <- reported
}

extern "C" __global__ void shared_array_by_pointer(const float* x, float* out) {
  __shared__ float first[64];
  __shared__ float second[64];
  store(second, threadIdx.x + BROKEN, 1.0f);
  if (threadIdx.x == 0) second[0] = 1.0f;
  __syncthreads();
  store(first, threadIdx.x, x[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
}
