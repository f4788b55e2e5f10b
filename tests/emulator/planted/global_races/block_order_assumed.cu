// Every block adds to the result of the previous block, but nothing makes that block run first.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(5, np.int32)
// result: [0, 1, 2, 3, 4]
// report: race: (read|write) of 4 bytes at byte \d+ of argument 1
extern "C" __global__ void block_order_assumed(int* turn, int* total) {
  if (threadIdx.x != 0) return;
  const int b = blockIdx.x;
#if !BROKEN
  while (atomicAdd(turn, 0) != b) __nanosleep(20);
#endif
  total[b + 1] = total[b] + 1;  // <- reported
#if !BROKEN
  __threadfence();
  atomicAdd(turn, 1);
#endif
}
