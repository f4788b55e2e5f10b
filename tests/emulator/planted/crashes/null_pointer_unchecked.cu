// A null pointer, compiled without checks of accesses: the write raises SIGSEGV.
//
// launch: block=64
// options: checked=False
// arg: None
// arg: np.zeros(64, np.float32)
// result: np.ones(64)
// report: null pointer: access to address 0x
extern "C" __global__ void null_pointer_unchecked(float* optional, float* out) {
  if (BROKEN || optional != nullptr) {
    optional[threadIdx.x + 1] = 1.0f;  // <- reported
  }
  out[threadIdx.x] = 1.0f;
}
