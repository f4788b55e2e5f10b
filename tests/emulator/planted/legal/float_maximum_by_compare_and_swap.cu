// A maximum of floats through atomicCAS on their bits; the first guess is read atomically.
//
// launch: grid=2, block=64
// options: global_races=True
// arg: np.arange(128, dtype=np.float32)
// arg: np.zeros(1, np.float32)
// result: [127]
extern "C" __global__ void float_maximum_by_compare_and_swap(const float* x, float* most) {
  const float mine = x[blockIdx.x * 64 + threadIdx.x];
  int* bits = reinterpret_cast<int*>(most);
  int seen = atomicAdd(bits, 0);
  while (__int_as_float(seen) < mine) {
    const int before = atomicCAS(bits, seen, __float_as_int(mine));
    if (before == seen) break;
    seen = before;
  }
}
