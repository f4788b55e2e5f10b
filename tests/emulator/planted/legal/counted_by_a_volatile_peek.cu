// A volatile load of a maximum skips atomics that would not raise it.
//
// launch: grid=2, block=64
// options: global_races=True
// arg: np.arange(128, dtype=np.int32)
// arg: np.zeros(1, np.int32)
// result: [127]
extern "C" __global__ void counted_by_a_volatile_peek(const int* x, int* most) {
  const int mine = x[blockIdx.x * 64 + threadIdx.x];
  if (mine > *static_cast<volatile int*>(most)) atomicMax(most, mine);
}
