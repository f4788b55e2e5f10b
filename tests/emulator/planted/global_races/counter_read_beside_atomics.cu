// Threads that increment a counter atomically read it again with a plain load.
//
// launch: grid=2, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(64, np.int32)
// report: race: (read|atomic) of 4 bytes at byte 0 of argument 0
extern "C" __global__ void counter_read_beside_atomics(int* counter, int* out) {
  const int mine = atomicAdd(counter, 1);  // <- reported
#if BROKEN
  out[mine] = *counter;  // <- reported
#else
  out[mine] = mine + 1;
#endif
}
