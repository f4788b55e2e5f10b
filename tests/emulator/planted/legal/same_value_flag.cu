// Many threads set a flag to the same value, which is not a race with the option same_value_writes.
//
// launch: grid=2, block=64
// options: same_value_writes=True, global_races=True
// arg: np.arange(128, dtype=np.int32)
// arg: np.zeros(1, np.int32)
// arg: np.zeros(128, np.int32)
// result: (np.arange(128) >= 64)
extern "C" __global__ void same_value_flag(const int* x, int* anywhere, int* out) {
  __shared__ bool found;
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (threadIdx.x == 0) found = false;
  __syncthreads();
  if (x[i] > 100) found = true;
  if (x[i] > 10) *anywhere = 1;
  __syncthreads();
  out[i] = found;
}
