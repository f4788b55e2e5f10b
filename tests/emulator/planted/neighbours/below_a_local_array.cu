// An index far below a local array, outside all local variables.
//
// launch: block=32
// arg: np.arange(8, dtype=np.float32)
// arg: np.array([-4096], np.int32)
// arg: np.zeros(32, np.float32)
// result: np.full(32, 28.0)
// report: out of bounds: write of 4 bytes outside of the thread's local variables
// report: thread \(0, 0, 0\)
__device__ __attribute__((noinline)) void store(float* to, int i, float value) {
  to[i] = value;  // <- reported
}

extern "C" __global__ void below_a_local_array(const float* x, const int* shift, float* out) {
  float row[8];
  for (int i = 0; i < 8; ++i) store(row, BROKEN ? i + *shift : i, x[i]);
  float sum = 0.0f;
  for (int i = 0; i < 8; ++i) sum += row[i];
  out[threadIdx.x] = sum;
}
