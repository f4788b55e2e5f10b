// A plain load of a maximum skips atomics that would not raise it, while other threads raise it.
//
// launch: block=64
// arg: np.arange(64, dtype=np.int32)
// arg: np.zeros(1, np.int32)
// result: [63]
// report: race: (read|atomic) of 4 bytes
extern "C" __global__ void plain_peek_before_atomic(const int* x, int* out) {
  __shared__ int most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
#if BROKEN
  if (x[threadIdx.x] > most) atomicMax(&most, x[threadIdx.x]);  // <- reported
#else
  atomicMax(&most, x[threadIdx.x]);
#endif
  __syncthreads();
  if (threadIdx.x == 0) out[0] = most;
}
