// A sum of doubles through atomicCAS, as before compute capability 6.0; the first guess is a plain load.
//
// launch: grid=4, block=64
// options: global_races=True
// arg: np.ones(256, np.float64)
// arg: np.zeros(1, np.float64)
// result: [256]
__device__ double add(double* to, double value) {
  auto* bits = reinterpret_cast<unsigned long long*>(to);
  unsigned long long old = *bits, assumed;
  do {
    assumed = old;
    old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
  } while (assumed != old);
  return __longlong_as_double(old);
}

extern "C" __global__ void double_sum_by_compare_and_swap(const double* x, double* sum) {
  add(sum, x[blockIdx.x * 64 + threadIdx.x]);
}
