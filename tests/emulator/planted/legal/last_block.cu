// Every block stores its parts and takes a ticket; the block with the last ticket adds all parts. Only the
// thread that takes the ticket fences, after the barrier.
//
// launch: grid=6, block=64
// options: global_races=True
// arg: np.arange(384, dtype=np.float32)
// arg: np.zeros(384, np.float32)
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.float32)
// result: [2 * np.arange(384).sum()]
extern "C" __global__ void last_block(const float* x, float* parts, int* tickets, float* out) {
  __shared__ bool last;
  __shared__ float sum;
  const int i = blockIdx.x * 64 + threadIdx.x;
  parts[i] = 2.0f * x[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(tickets, 1) == gridDim.x - 1;
    sum = 0.0f;
  }
  __syncthreads();
  if (!last) return;
  for (int b = 0; b < gridDim.x; ++b) atomicAdd(&sum, parts[b * 64 + threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = sum;
}
