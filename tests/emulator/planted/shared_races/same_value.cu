// Many threads set a flag that is read after a barrier. In the broken twin they write different
// values: the result is undefined.
//
// launch: block=64
// options: same_value_writes=True
// arg: np.arange(64, dtype=np.int32)
// arg: np.zeros(64, np.int32)
// result: np.ones(64)
// report: race: write of 4 bytes
extern "C" __global__ void same_value(const int* x, int* out) {
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  if (x[threadIdx.x] > 40) found = BROKEN ? x[threadIdx.x] : 1;  // <- reported
  __syncthreads();
  out[threadIdx.x] = found;
}
