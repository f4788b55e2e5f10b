// A function that returns no value for some arguments.
//
// launch: block=64
// arg: np.arange(64, dtype=np.float32)
// arg: np.zeros(64, np.float32)
// result: np.minimum(np.arange(64), 32)
// report: a function that returns a value ends without return
// report: thread \(32, 0, 0\)
__device__ float at_most_32(float x) {  // <- reported
  if (x < 32.0f) return x;
#if !BROKEN
  return 32.0f;
#endif
}

extern "C" __global__ void missing_return(const float* x, float* out) {
  out[threadIdx.x] = at_most_32(x[threadIdx.x]);
}
