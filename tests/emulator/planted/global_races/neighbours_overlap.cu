// Blocks write a row of 64 each, but the rows are taken to be 60 apart.
//
// launch: grid=3, block=64
// options: global_races=True
// arg: np.zeros(192, np.float32)
// result: np.repeat(np.arange(3), 64)
// report: race: write of 4 bytes at byte \d+ of argument 0
extern "C" __global__ void neighbours_overlap(float* out) {
  out[blockIdx.x * (BROKEN ? 60 : 64) + threadIdx.x] = blockIdx.x;  // <- reported
}
