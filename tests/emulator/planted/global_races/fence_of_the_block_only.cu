// A block passes a result to another through a flag, with only a block-scope fence before the flag.
//
// launch: grid=2, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(33, np.float32)
// report: race: (read|write) of 4 bytes at byte \d+ of argument 1
extern "C" __global__ void fence_of_the_block_only(int* flag, float* out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    out[0] = 7.0f;  // <- reported
#if BROKEN
    __threadfence_block();
#else
    __threadfence();
#endif
    atomicExch(flag, 1);
  } else {
    while (atomicAdd(flag, 0) == 0) __nanosleep(20);
    out[1] = out[0];  // <- reported
  }
}
