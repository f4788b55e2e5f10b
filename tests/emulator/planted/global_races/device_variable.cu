// A counter in a __device__ variable, incremented by all blocks without atomics.
//
// launch: grid=4, block=32
// options: global_races=True
// arg: np.zeros(1, np.int32)
// report: race: (read|write) of 4 bytes at .*a __device__ variable \(`__device__ int finished`\)
__device__ int finished;

extern "C" __global__ void device_variable(int* out) {
  if (threadIdx.x != 0) return;
#if BROKEN
  ++finished;  // <- reported
#else
  atomicAdd(&finished, 1);
#endif
}
