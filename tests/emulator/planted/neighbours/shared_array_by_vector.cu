// The last vector store runs past the end of a shared array.
//
// launch: block=32
// arg: np.arange(32 * 4, dtype=np.float32)
// arg: np.zeros(32 * 4, np.float32)
// result: np.arange(32 * 4)
// report: out of bounds: write of 16 bytes at byte \d+ of the static shared memory
// report: thread \(31, 0, 0\)
constexpr int kCount = BROKEN ? 126 : 128;

__device__ void store(float4* to, int i, float4 value) {
  to[i] = value;  // <- reported
}

extern "C" __global__ void shared_array_by_vector(const float4* x, float4* out) {
  __shared__ __align__(16) float row[kCount];
  __shared__ float other[16];
  if (threadIdx.x < 16) other[threadIdx.x] = 0.0f;
  store(reinterpret_cast<float4*>(row), threadIdx.x, x[threadIdx.x]);
  __syncthreads();
  float4 value = reinterpret_cast<float4*>(row)[threadIdx.x];
  value.x += other[threadIdx.x % 16];
  out[threadIdx.x] = value;
}
