// Both halves of every pair are read and used, but only the first has been written.
//
// launch: block=32
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// result: 2 * np.arange(31, -1, -1)
// report: uninitialised shared memory
// missed: a vector load may include bytes that have not been written
extern "C" __global__ void half_of_a_vector_unwritten(const float* x, float* out) {
  __shared__ float2 pairs[32];
  const int t = threadIdx.x;
  pairs[t].x = x[t];
#if !BROKEN
  pairs[t].y = x[t];
#endif
  __syncthreads();
  const float2 other = pairs[31 - t];  // <- reported
  out[t] = other.x + other.y;
}
