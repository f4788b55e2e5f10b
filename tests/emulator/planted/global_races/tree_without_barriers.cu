// A tree reduction in global memory, without a barrier between its steps.
//
// launch: block=64
// options: global_races=True
// arg: np.ones(64, np.float32)
// report: race: (read|write) of 4 bytes at byte \d+ of argument 0
extern "C" __global__ void tree_without_barriers(float* row) {
  for (int half = 32; half > 0; half /= 2) {
    if (threadIdx.x < half) row[threadIdx.x] += row[threadIdx.x + half];  // <- reported
#if !BROKEN
    __syncthreads();
#endif
  }
}
