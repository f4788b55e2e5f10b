// Threads of all blocks count into the same bins without atomics.
//
// launch: grid=4, block=64
// options: global_races=True
// arg: (np.arange(256) % 7).astype(np.int32)
// arg: np.zeros(7, np.int32)
// result: np.bincount(np.arange(256) % 7)
// report: race: (read|write) of 4 bytes at byte \d+ of argument 1
// report: \(`bins`, element \[\d\], int32 of shape \(7,\)\)
extern "C" __global__ void histogram_without_atomics(const int* x, int* bins) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
#if BROKEN
  ++bins[x[i]];  // <- reported
#else
  atomicAdd(&bins[x[i]], 1);
#endif
}
