// A spin lock in shared memory that protects plain accesses to shared memory.
//
// launch: block=64
// arg: np.zeros(1, np.int32)
// result: [64]
extern "C" __global__ void spin_lock_in_shared_memory(int* out) {
  __shared__ int lock;
  __shared__ int count;
  if (threadIdx.x == 0) lock = count = 0;
  __syncthreads();
  while (atomicCAS(&lock, 0, 1) != 0) {
  }
  count += 1;
  __threadfence_block();
  atomicExch(&lock, 0);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = count;
}
