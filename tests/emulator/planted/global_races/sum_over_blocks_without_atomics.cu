// Split-k: blocks add their partial sums to one result without atomics.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.ones(128, np.float32)
// arg: np.zeros(32, np.float32)
// result: np.full(32, 4)
// report: race: (read|write) of 4 bytes at byte \d+ of argument 1
extern "C" __global__ void sum_over_blocks_without_atomics(const float* x, float* sum) {
  const float part = x[blockIdx.x * 32 + threadIdx.x];
#if BROKEN
  sum[threadIdx.x] += part;  // <- reported
#else
  atomicAdd(&sum[threadIdx.x], part);
#endif
}
