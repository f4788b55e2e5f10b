// A ticket counter: the result of a plain load is the ticket, not only the first guess of an atomicCAS.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(128, np.int32)
// report: race: (read|atomic) of 4 bytes at byte 0 of argument 0
extern "C" __global__ void guess_that_is_the_result(int* next, int* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
#if BROKEN
  out[i] = *next;  // <- reported
  atomicAdd(next, 1);  // <- reported
#else
  int old = *next, assumed;
  do {
    assumed = old;
    old = atomicCAS(next, assumed, assumed + 1);
  } while (assumed != old);
  out[i] = old;
#endif
}
