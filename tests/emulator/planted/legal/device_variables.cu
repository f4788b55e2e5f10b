// A table in constant memory, and a __device__ counter: incremented atomically, read after a barrier.
//
// launch: block=32
// options: global_races=True
// arg: np.zeros(32, np.int32)
// result: np.arange(32) % 4 * 10 + 32
__device__ int counter = 0;
__device__ int scratch[32];
__constant__ int tens[4] = {0, 10, 20, 30};

extern "C" __global__ void device_variables(int* out) {
  const int t = threadIdx.x;
  if (t == 0) counter = 0;
  __syncthreads();
  atomicAdd(&counter, 1);
  scratch[t] = tens[t % 4];
  __syncthreads();
  out[t] = scratch[t] + counter;
}
