// Float maximum in shared memory: after a plain load, threads with smaller values skip atomicCAS.
//
// launch: grid=2, block=64
// options: global_races=True
// arg: np.arange(128, dtype=np.float32)
// arg: np.zeros(2, np.float32)
// result: [63, 127]
extern "C" __global__ void shared_maximum_by_compare_and_swap(const float* x, float* most) {
  __shared__ int best;
  if (threadIdx.x == 0) best = 0;
  __syncthreads();
  const float mine = x[blockIdx.x * 64 + threadIdx.x];
  int seen = best;
  while (__int_as_float(seen) < mine) {
    const int before = atomicCAS(&best, seen, __float_as_int(mine));
    if (before == seen) break;
    seen = before;
  }
  __syncthreads();
  if (threadIdx.x == 0) most[blockIdx.x] = __int_as_float(best);
}
