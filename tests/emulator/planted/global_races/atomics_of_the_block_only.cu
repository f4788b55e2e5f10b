// Blocks share a counter, but increment it with block-scope atomics.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// result: [128]
// report: race: atomic of 4 bytes
extern "C" __global__ void atomics_of_the_block_only(int* count) {
#if BROKEN
  atomicAdd_block(count, 1);  // <- reported
#else
  atomicAdd(count, 1);
#endif
}
