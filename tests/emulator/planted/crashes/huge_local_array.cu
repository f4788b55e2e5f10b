// A local array that is larger than the stack.
//
// launch: block=64
// arg: np.arange(64, dtype=np.int32)
// arg: np.zeros(64, np.int32)
// result: np.arange(64)[::-1]
// report: stack overflow: .* more than 256 KiB
constexpr int kCount = BROKEN ? 1 << 20 : 1 << 10;

extern "C" __global__ void huge_local_array(const int* x, int* out) {
  int reversed[kCount];
  for (int i = 0; i < 64; ++i) reversed[63 - i] = x[i];
  out[threadIdx.x] = reversed[x[threadIdx.x]];
}
