// The halves of a warp exchange values, but the masks of __syncwarp contain only one half each.
//
// launch: block=32
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// result: np.arange(31, -1, -1)
// report: race: read of 4 bytes|uninitialised
extern "C" __global__ void syncwarp_of_other_lanes(const float* x, float* out) {
  __shared__ float row[32];
  const int t = threadIdx.x;
  row[t] = x[t];
  __syncwarp(BROKEN ? (t < 16 ? 0xffffu : 0xffff0000u) : 0xffffffffu);
  out[t] = row[31 - t];  // <- reported
}
