// Each block reads what its neighbour stored in the previous phase, without a grid barrier in between.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(4, np.int32)
// arg: np.zeros(4, np.int32)
// result: [1, 2, 3, 0]
// report: race: (read|write) of 4 bytes at byte \d+ of argument 1
extern "C" __global__ void grid_barrier_left_out(int* arrived, int* a, int* b) {
  if (threadIdx.x != 0) return;
  a[blockIdx.x] = blockIdx.x;  // <- reported
#if !BROKEN
  __threadfence();
  atomicAdd(arrived, 1);
  while (atomicAdd(arrived, 0) < gridDim.x) __nanosleep(20);
#endif
  b[blockIdx.x] = a[(blockIdx.x + 1) % gridDim.x];  // <- reported
}
