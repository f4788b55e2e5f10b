// A loop on a condition that never changes.
//
// launch: block=64
// options: patience=0.3
// arg: np.ones(1, np.int32)
// arg: np.zeros(64, np.float32)
// report: no progress: a thread has computed for 0.3 seconds
// report: thread \(3, 0, 0\)
// report: threads 0-2 wait at __syncthreads
extern "C" __global__ void plain_loop(const int* step, float* out) {
  int i = 0;
  if (threadIdx.x == 3) {
    while (i < 10) i += BROKEN ? 0 : *step;
  }
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}
