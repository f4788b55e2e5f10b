// memcpy with a length in the wrong unit.
//
// launch: block=1
// arg: np.arange(64, dtype=np.float32)
// arg: np.array([64], np.int32)
// arg: np.zeros(64, np.float32)
// result: np.arange(64)
// report: out of bounds: read of 1024 bytes at global memory across the end of argument 0
extern "C" __global__ void copy_past_the_end(const float* x, const int* count, float* out) {
  const int bytes = *count * sizeof(float);
  memcpy(out, x, BROKEN ? bytes * sizeof(float) : bytes);  // <- reported
}
