// A switch reaches a default that is declared unreachable.
//
// launch: block=64
// arg: np.zeros(64, np.int32)
// result: np.arange(64) % 3
// report: __builtin_unreachable is reached
// report: thread \(2, 0, 0\)
extern "C" __global__ void unreachable(int* out) {
  switch (threadIdx.x % 3) {
    case 0: out[threadIdx.x] = 0; break;
    case 1: out[threadIdx.x] = 1; break;
#if !BROKEN
    case 2: out[threadIdx.x] = 2; break;
#endif
    default: __builtin_unreachable();  // <- reported
  }
}
