// A shift by one in place: the first element of the next block may already have been overwritten.
//
// launch: grid=2, block=64
// options: global_races=True
// arg: np.arange(129, dtype=np.float32)
// arg: np.zeros(129, np.float32)
// report: race: (read|write) of 4 bytes at byte 256 of argument 0
extern "C" __global__ void in_place_across_blocks(float* x, float* out) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  const float next = x[i + 1];  // <- reported
  __syncthreads();
#if BROKEN
  x[i] = next;  // <- reported
#else
  out[i] = next;
#endif
}
