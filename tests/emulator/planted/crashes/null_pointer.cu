// The kernel writes an optional array that the launch does not pass.
//
// launch: block=64
// arg: None
// arg: np.zeros(64, np.float32)
// result: np.ones(64)
// report: null pointer: write of 4 bytes at address 0x
extern "C" __global__ void null_pointer(float* optional, float* out) {
  if (BROKEN || optional != nullptr) optional[threadIdx.x + 1] = 1.0f;  // <- reported
  out[threadIdx.x] = 1.0f;
}
