// A spin lock around a plain counter is released without a fence after the update.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.int32)
// result: [4]
// report: race: (read|write) of 4 bytes at byte 0 of argument 1
extern "C" __global__ void spin_lock_without_fence(int* lock, int* count) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(lock, 0, 1) != 0) __nanosleep(20);
  ++*count;  // <- reported
#if !BROKEN
  __threadfence();
#endif
  atomicExch(lock, 0);
}
