// A row of 66 floats is read as float4: two uninitialised floats after it are loaded but not used.
//
// launch: block=32
// arg: np.arange(66, dtype=np.float32)
// arg: np.zeros(66, np.float32)
// result: 2 * np.arange(66)
extern "C" __global__ void vector_over_a_tail(const float* x, float* out) {
  __shared__ __align__(16) float row[68];
  for (int i = threadIdx.x; i < 66; i += 32) row[i] = x[i];
  __syncthreads();
  for (int i = 4 * threadIdx.x; i < 66; i += 128) {
    const float4 four = *reinterpret_cast<const float4*>(&row[i]);
    const float values[4] = {four.x, four.y, four.z, four.w};
    for (int j = 0; j < 4 && i + j < 66; ++j) out[i + j] = 2.0f * values[j];
  }
}
