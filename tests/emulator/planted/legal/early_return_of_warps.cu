// Threads and whole warps return before barriers that reduce a predicate.
//
// launch: block=128
// arg: np.int32(70)
// arg: np.zeros(3, np.int32)
// result: [35, 0, 1]
extern "C" __global__ void early_return_of_warps(int count, int* out) {
  const int t = threadIdx.x;
  if (t >= count) return;
  const int even = __syncthreads_count(t % 2 == 0);
  const int all = __syncthreads_and(t < count);
  const int any = __syncthreads_or(t == 1000);
  if (t == 0) {
    out[0] = even;
    out[1] = any;
    out[2] = all;
  }
}
