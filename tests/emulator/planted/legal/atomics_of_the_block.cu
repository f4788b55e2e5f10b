// Each block counts in its own element with block-scope atomics; one thread per block adds it to a sum.
//
// launch: grid=4, block=64
// options: global_races=True
// arg: np.zeros(4, np.int32)
// arg: np.zeros(1, np.int32)
// result: [256]
extern "C" __global__ void atomics_of_the_block(int* counts, int* sum) {
  atomicAdd_block(&counts[blockIdx.x], 1);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(sum, counts[blockIdx.x]);
}
