// ld.acquire and red.release: synchronisation between blocks through global memory.
//
// Forward progress: wait only for blocks that are guaranteed to be running or to have run.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// ld.acquire.gpu: writes that precede the release whose value is returned are visible afterwards.
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

// red.release.gpu.add: earlier writes are visible to a thread that acquires the sum.
CUKIT_DEVICE void add_release(int* to, int value) {
#ifdef CUKIT_EMULATE
  __threadfence();
  atomicAdd(to, value);
#else
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(to), "r"(value) : "memory");
#endif
}

}  // namespace cukit
