// Thread 63 reads the total while other threads may still add to it.
//
// launch: block=64
// arg: np.ones(64, np.float32)
// arg: np.zeros(1, np.float32)
// result: [64]
// report: race: (read|atomic) of 4 bytes
// report: after the (atomic|read) by
extern "C" __global__ void total_read_beside_additions(const float* x, float* out) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.0f;
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);  // <- reported
#if !BROKEN
  __syncthreads();
#endif
  if (threadIdx.x == 63) out[0] = sum;  // <- reported
}
