// A factor is used before it has a value.
//
// launch: block=32
// arg: np.ones(32, np.float32)
// arg: np.zeros(32, np.float32)
// result: np.full(32, 2.0)
// report: uninitialised variable: `factor` is used before it has a value
extern "C" __global__ void scale(const float* x, float* out) {
#if BROKEN
  float factor;
#else
  float factor = 2.0f;
#endif
  out[threadIdx.x] = factor * x[threadIdx.x];  // <- reported
}
