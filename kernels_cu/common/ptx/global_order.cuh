// ld.acquire and red.release: blocks that wait for one another through global memory.
//
// Only blocks that are sure to run, or to have run, may be waited for.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// ld.acquire.gpu: what the block that released the value read did before it, is visible after this.
CUKIT_DEVICE int load_acquire(const int* from) {
#ifdef CUKIT_EMULATE
  emulator::yield();
  emulator::check_access(from, sizeof(int), emulator::Access::StrongRead);
  return static_cast<int>(emulator::atomic_load(from, sizeof(int)));
#else
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
#endif
}

// red.release.gpu.add
CUKIT_DEVICE void add_release(int* to, int value) {
#ifdef CUKIT_EMULATE
  __threadfence();
  atomicAdd(to, value);
#else
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(to), "r"(value) : "memory");
#endif
}

}  // namespace cukit
