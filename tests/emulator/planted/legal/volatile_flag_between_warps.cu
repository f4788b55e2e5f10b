// One warp passes data to another: a fence, then a volatile flag that the other polls.
//
// launch: block=64
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// result: 31 - np.arange(32)
extern "C" __global__ void volatile_flag_between_warps(const float* x, float* out) {
  __shared__ float row[32];
  __shared__ volatile int flag;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x >= 32) {
    row[lane] = x[lane];
    __threadfence_block();
    __syncwarp();
    if (lane == 0) flag = 1;
  } else {
    while (flag == 0) {
    }
    out[lane] = row[31 - lane];
  }
}
