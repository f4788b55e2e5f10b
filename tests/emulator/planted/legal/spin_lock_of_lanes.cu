// All lanes of a warp take a spin lock, which works since Volta (independent thread scheduling).
//
// launch: grid=2, block=64
// options: global_races=True
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.int32)
// result: [128]
extern "C" __global__ void spin_lock_of_lanes(int* lock, int* count) {
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  __threadfence();
  *count += 1;
  __threadfence();
  atomicExch(lock, 0);
}
