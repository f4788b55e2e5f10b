// Integer division by zero: the result is undefined on a GPU, and ends the process on a CPU.
//
// launch: block=64
// arg: np.arange(64, dtype=np.int32)
// arg: np.zeros(64, np.int32)
// result: np.array([640 // max(i % 32, 1) for i in range(64)])
// report: integer division by zero
// report: thread \(0, 0, 0\)
extern "C" __global__ void division_by_zero(const int* x, int* out) {
  const int divisor = x[threadIdx.x] % 32;
  out[threadIdx.x] = 640 / (BROKEN ? divisor : max(divisor, 1));  // <- reported
}
