// The reader of a flag reads the data without a fence after the flag.
//
// launch: grid=2, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(2, np.float32)
// result: [7, 7]
// report: race: read of 4 bytes
// missed: a fence is required only on the writer's side
extern "C" __global__ void flag_read_without_a_fence(int* flag, float* out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    out[0] = 7.0f;
    __threadfence();
    atomicExch(flag, 1);
  } else {
    while (atomicAdd(flag, 0) == 0) __nanosleep(20);
#if !BROKEN
    __threadfence();
#endif
    out[1] = out[0];  // <- reported
  }
}
