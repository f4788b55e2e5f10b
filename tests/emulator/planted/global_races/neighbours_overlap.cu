// Blocks write rows of 64 elements at a stride of 60.
//
// launch: grid=3, block=64
// options: global_races=True
// arg: np.zeros(192, np.float32)
// result: np.repeat(np.arange(3), 64)
// report: race: write of 4 bytes at byte \d+ of argument 0
extern "C" __global__ void neighbours_overlap(float* out) {
  out[blockIdx.x * (BROKEN ? 60 : 64) + threadIdx.x] = blockIdx.x;  // <- reported
}
