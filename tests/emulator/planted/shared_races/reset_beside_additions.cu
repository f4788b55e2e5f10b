// A counter is reset for the next round while another thread still reads this round's total.
//
// launch: block=64
// arg: np.zeros(2, np.int32)
// result: [64, 64]
// report: race: (write|read) of 4 bytes
extern "C" __global__ void reset_beside_additions(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[round] = count;  // <- reported
#if !BROKEN
    __syncthreads();
#endif
    if (threadIdx.x == 32) count = 0;  // <- reported
    __syncthreads();
  }
}
