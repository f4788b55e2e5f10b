// Keeps the stream busy for about `cycles` clocks of one SM.
//
// The timer launches it before the start event, so that the host has enqueued all kernels of a call
// before the first one can run: the device is timed, not the host.
//
// Grid: 1 block of 1 thread. Shared memory: none. Macros: none. Minimum arch: sm_80.
// Reference: none (computes nothing).
#include "common/platform.cuh"

extern "C" __global__ void __launch_bounds__(1) spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
