// Warp specialisation: named barriers, reallocation of registers between warpgroups.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// bar.sync: waits until `threads` threads (a multiple of 32) have arrived at barrier `number`,
// 0..15. __syncthreads uses barrier 0.
CUKIT_DEVICE void named_sync(int number, int threads) {
#ifdef CUKIT_EMULATE
  emulator::sync_named(number, threads);
#else
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
#endif
}

// bar.arrive: arrives at the barrier without waiting.
CUKIT_DEVICE void named_arrive(int number, int threads) {
#ifdef CUKIT_EMULATE
  emulator::arrive_named(number, threads);
#else
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
#endif
}

// setmaxnreg.dec (sm_90a): releases registers, down to `Count` per thread; all warps of the
// warpgroup call it.
template <int Count>
CUKIT_DEVICE void give_registers() {
#ifndef CUKIT_EMULATE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Count));
#endif
}

// setmaxnreg.inc (sm_90a): waits for registers and takes them, up to `Count` per thread.
template <int Count>
CUKIT_DEVICE void take_registers() {
#ifndef CUKIT_EMULATE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Count));
#endif
}

}  // namespace cukit
