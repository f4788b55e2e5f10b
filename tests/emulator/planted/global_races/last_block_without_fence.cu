// The last block to finish adds the parts of all blocks, which take their tickets without a fence.
//
// launch: grid=8, block=32
// options: global_races=True
// arg: np.zeros(8, np.float32)
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.float32)
// result: [28]
// report: race: read of 4 bytes at byte \d+ of argument 0
extern "C" __global__ void last_block_without_fence(float* partial, int* tickets, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = blockIdx.x;  // <- reported
#if !BROKEN
    __threadfence();
#endif
    last = atomicAdd(tickets, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0.0f;
    for (int i = 0; i < gridDim.x; ++i) sum += partial[i];  // <- reported
    out[0] = sum;
  }
}
