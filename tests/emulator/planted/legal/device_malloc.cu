// Threads allocate memory from the device heap, a neighbour reads it, and the owner frees it.
//
// launch: block=32
// arg: np.zeros(32, np.int32)
// result: (np.arange(32) + 1) % 32 * 3
extern "C" __global__ void device_malloc(int* out) {
  __shared__ int* rows[32];
  const int t = threadIdx.x;
  rows[t] = static_cast<int*>(malloc(3 * sizeof(int)));
  for (int i = 0; i < 3; ++i) rows[t][i] = t;
  __syncthreads();
  const int* row = rows[(t + 1) % 32];
  out[t] = row[0] + row[1] + row[2];
  __syncthreads();
  free(rows[t]);
}
