// One warp waits at a barrier in a branch that the other does not take; the other polls a flag that
// is set after the barrier.
//
// launch: block=64
// options: patience=0.2
// arg: np.zeros(1, np.int32)
// report: no progress: a thread polls
// report: __syncthreads is missing 32 of 64 arrivals: threads 32-63 have not arrived
extern "C" __global__ void barrier_in_a_branch(int* flag) {
#if BROKEN
  if (threadIdx.x < 32) {
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(flag, 1);
  } else {
    while (atomicAdd(flag, 0) == 0) __nanosleep(20);  // <- reported
  }
#else
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(flag, 1);
  while (atomicAdd(flag, 0) == 0) __nanosleep(20);
#endif
}
