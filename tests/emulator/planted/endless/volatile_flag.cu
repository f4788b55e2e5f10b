// Threads poll a volatile flag that no thread sets; in the clean twin another warp sets it.
//
// launch: block=64
// options: patience=0.3
// arg: np.zeros(1, np.int32)
// arg: np.zeros(64, np.float32)
// result: np.ones(64)
// report: no progress: a thread polls
// report: thread \(\d+, 0, 0\)
extern "C" __global__ void volatile_flag(int* flag, float* out) {
  if (threadIdx.x == 32 && !BROKEN) *static_cast<volatile int*>(flag) = 1;
  if (threadIdx.x < 32) {
    while (*static_cast<volatile int*>(flag) == 0) {  // <- reported
    }
  }
  out[threadIdx.x] = 1.0f;
}
