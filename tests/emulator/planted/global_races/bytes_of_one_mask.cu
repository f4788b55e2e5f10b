// Threads set bits of a mask with plain updates: bits of threads that share a byte may be lost.
//
// launch: block=64
// options: global_races=True
// arg: np.zeros(8, np.uint8)
// report: race: (read|write) of 1 bytes at byte 0 of argument 0
extern "C" __global__ void bytes_of_one_mask(unsigned char* mask) {
#if BROKEN
  mask[threadIdx.x / 8] |= 1 << threadIdx.x % 8;  // <- reported
#else
  if (threadIdx.x % 8 == 0) mask[threadIdx.x / 8] = 0xff;
#endif
}
