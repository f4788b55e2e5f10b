// A spin lock that its holder never releases.
//
// launch: block=64
// options: patience=0.3
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.float32)
// result: np.array([64.0])
// report: no progress: a thread polls
extern "C" __global__ void lock_never_released(int* lock, float* out) {
  while (atomicCAS(lock, 0, 1) != 0) {  // <- reported
  }
  __threadfence();
  out[0] += 1.0f;
  __threadfence();
  if (!BROKEN) atomicExch(lock, 0);
}
