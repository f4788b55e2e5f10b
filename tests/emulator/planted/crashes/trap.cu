// A trap in one thread.
//
// launch: block=64
// arg: np.zeros(64, np.float32)
// report: the kernel aborted: __trap
// report: thread \(7, 0, 0\)
extern "C" __global__ void trap(float* out) {
  if (BROKEN && threadIdx.x == 7) __trap();  // <- reported
  out[threadIdx.x] = 1.0f;
}
