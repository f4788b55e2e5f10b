// One thread fences and takes the block's ticket without a barrier after the other threads' stores.
//
// launch: grid=4, block=64
// options: global_races=True
// arg: np.zeros(256, np.float32)
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.float32)
// result: [256]
// report: race: (read|write) of 4 bytes at byte \d+ of argument 0
extern "C" __global__ void ticket_of_one_thread_for_all(float* parts, int* tickets, float* out) {
  __shared__ bool last;
  parts[blockIdx.x * 64 + threadIdx.x] = 1.0f;
#if !BROKEN
  __syncthreads();
#endif
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(tickets, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0.0f;
    for (int i = 0; i < 256; ++i) sum += parts[i];
    out[0] = sum;
  }
}
