// As in CUDA's threadFenceReduction sample: every thread fences its own store, then one takes the ticket,
// and the last block reads the parts of the others without another fence.
//
// launch: grid=6, block=32
// options: global_races=True
// arg: np.zeros(192, np.float32)
// arg: np.zeros(1, np.int32)
// arg: np.zeros(32, np.float32)
// result: np.full(32, 15)
extern "C" __global__ void ticket_after_the_others_fence(float* parts, int* tickets, float* out) {
  __shared__ bool last;
  parts[blockIdx.x * 32 + threadIdx.x] = blockIdx.x;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(tickets, 1) == gridDim.x - 1;
  __syncthreads();
  if (last) {
    float sum = 0.0f;
    for (int b = 0; b < gridDim.x; ++b) sum += parts[b * 32 + 31 - threadIdx.x];
    out[threadIdx.x] = sum;
  }
}
