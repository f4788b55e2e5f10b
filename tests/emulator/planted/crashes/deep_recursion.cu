// A recursion that overflows the stack.
//
// launch: block=64
// arg: np.array([8, 1 << 30], np.int32)
// arg: np.zeros(64, np.float32)
// result: np.full(64, 36.0)
// report: stack overflow: .* more than 256 KiB
// report: thread \(0, 0, 0\)
__device__ __attribute__((noinline)) float sum_to(int n) {
  volatile float term = n;  // <- reported
  return n == 0 ? 0.0f : term + sum_to(n - 1);
}

extern "C" __global__ void deep_recursion(const int* depths, float* out) {
  out[threadIdx.x] = sum_to(depths[BROKEN]);
}
