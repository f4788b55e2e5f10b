// A warp passes data to another through a volatile flag, without a fence between the data and the flag.
//
// launch: block=64
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// result: np.arange(32)
// report: race: (read|write) of 4 bytes
extern "C" __global__ void flag_without_fence(const float* x, float* out) {
  __shared__ float row[32];
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    row[lane] = x[lane];
    __syncwarp();
    if (lane == 0) {
#if !BROKEN
      __threadfence_block();
#endif
      *const_cast<volatile int*>(&flag) = 1;
    }
  } else {
    while (*const_cast<volatile int*>(&flag) == 0) {
    }
    out[lane] = row[lane];
  }
}
