// A shuffle with a full mask, in a branch that half of the lanes take.
//
// launch: block=32
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// report: deadlock
// report: threads 0-15 wait at __shfl_xor_sync
extern "C" __global__ void shuffle_of_half_a_warp(const float* x, float* out) {
  float value = x[threadIdx.x];
  if (threadIdx.x < 16) {
    value += __shfl_xor_sync(BROKEN ? 0xffffffffu : 0xffffu, value, 1);  // <- reported
  } else {
    __syncwarp(BROKEN ? 0xffffffffu : 0xffff0000u);
  }
  out[threadIdx.x] = value;
}
