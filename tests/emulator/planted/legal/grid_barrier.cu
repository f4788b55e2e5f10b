// All blocks meet at a hand-written grid barrier three times; the grid is small enough to be resident.
//
// launch: grid=8, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(8, np.int32)
// arg: np.zeros(8, np.int32)
// result: 2 * np.roll(np.arange(8), -2)
__device__ void meet(int* arrived, int target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < target) __nanosleep(50);
    __threadfence();
  }
  __syncthreads();
}

extern "C" __global__ void grid_barrier(int* arrived, int* a, int* b) {
  const int block = blockIdx.x;
  const int next = (block + 1) % gridDim.x;
  if (threadIdx.x == 7) a[block] = 2 * block;
  meet(arrived, gridDim.x);
  int value = 0;
  if (threadIdx.x == 3) value = a[next];
  meet(arrived, 2 * gridDim.x);
  if (threadIdx.x == 3) a[block] = value;
  meet(arrived, 3 * gridDim.x);
  if (threadIdx.x == 9) b[block] = a[next];
}
