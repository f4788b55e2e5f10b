// A volatile flag in shared memory whose first store follows an unrelated fence.
//
// launch: block=64
// arg: np.zeros(64, np.int32)
// result: np.ones(64)
extern "C" __global__ void volatile_store_after_a_fence(int* out) {
  __shared__ volatile int flag;
  out[threadIdx.x] = 0;
  __threadfence();
  if (threadIdx.x == 0) flag = 1;
  __syncthreads();
  out[threadIdx.x] = flag;
}
