// Two blocks take a lock with block-scope atomics.
//
// launch: grid=2, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.int32)
// result: [2]
// report: race: atomic of 4 bytes at byte 0 of argument 0
#if BROKEN
#define TAKE atomicCAS_block
#define GIVE atomicExch_block
#else
#define TAKE atomicCAS
#define GIVE atomicExch
#endif
extern "C" __global__ void lock_of_the_block_only(int* lock, int* count) {
  if (threadIdx.x != 0) return;
  while (TAKE(lock, 0, 1) != 0) {  // <- reported
  }
  __threadfence();
  *count += 1;
  __threadfence();
  GIVE(lock, 0);
}
