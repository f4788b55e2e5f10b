// A block sets a flag for another block; both access it with plain loads and stores.
//
// launch: grid=2, block=32
// options: global_races=True, threads=1
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.float32)
// report: race: read of 4 bytes at byte 0 of argument 0
extern "C" __global__ void plain_flag_of_another_block(int* flag, float* out) {
  if (threadIdx.x != 0) return;
#if BROKEN
  int* there = flag;
#else
  volatile int* there = flag;
#endif
  if (blockIdx.x == 0) {
    __threadfence();
    *there = 1;  // <- reported
  } else {
    if (*there == 1) out[0] = 1.0f;  // <- reported
  }
}
