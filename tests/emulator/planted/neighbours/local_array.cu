// A pointer runs past the end of a local array.
//
// launch: block=32
// arg: np.arange(8, dtype=np.float32)
// arg: np.array([9], np.int32)
// arg: np.zeros(32, np.float32)
// result: np.full(32, 28.0)
// report: out of bounds: load of 'const float' outside of the variable that the pointer points into
// report: thread \(0, 0, 0\)
extern "C" __global__ void local_array(const float* x, const int* count, float* out) {
  float row[8];
  float other[8];
  for (int i = 0; i < 8; ++i) {
    row[i] = x[i];
    other[i] = -x[i];
  }
  float sum = 0.0f;
  const float* from = row;
  for (int i = 0; i < (BROKEN ? *count : *count - 1); ++i) sum += from[i];  // <- reported
  out[threadIdx.x] = sum + other[0];
}
