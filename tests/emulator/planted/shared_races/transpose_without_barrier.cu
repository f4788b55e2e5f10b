// A tile is written by rows and read by columns, with only a __syncwarp in between.
//
// launch: block=1024
// arg: np.arange(1024, dtype=np.float32)
// arg: np.zeros(1024, np.float32)
// result: np.arange(1024).reshape(32, 32).T.reshape(-1)
// report: race|uninitialised
// report: `tile\[\d+\]\[\d+\]` of `__shared__ float tile\[32\]\[33\]`
extern "C" __global__ void transpose_without_barrier(const float* x, float* out) {
  __shared__ float tile[32][33];
  const int row = threadIdx.x / 32;
  const int column = threadIdx.x % 32;
  tile[row][column] = x[threadIdx.x];
#if BROKEN
  __syncwarp();
#else
  __syncthreads();
#endif
  out[threadIdx.x] = tile[column][row];  // <- reported
}
