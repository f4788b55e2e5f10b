// A block exchanges values through its part of a global scratch array, without a barrier.
//
// launch: grid=2, block=64
// options: global_races=True
// arg: np.arange(128, dtype=np.float32)
// arg: np.zeros(128, np.float32)
// arg: np.zeros(128, np.float32)
// result: np.arange(128).reshape(2, 64)[:, ::-1].reshape(-1)
// report: race: (read|write) of 4 bytes at byte \d+ of argument 1
extern "C" __global__ void scratch_without_barrier(const float* x, float* scratch, float* out) {
  const int base = blockIdx.x * 64;
  scratch[base + threadIdx.x] = x[base + threadIdx.x];  // <- reported
#if !BROKEN
  __syncthreads();
#endif
  out[base + threadIdx.x] = scratch[base + 63 - threadIdx.x];  // <- reported
}
