// ld.acquire and red.release, ld.relaxed and st.relaxed: communication between blocks through
// global memory.
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

// ld.relaxed.gpu of 4 or 8 bytes: a value that another block may write meanwhile.
template <typename T>
CUKIT_DEVICE T load_relaxed(const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "an integer");
#ifdef CUKIT_EMULATE
  emulator::yield();
  emulator::check_access(from, sizeof(T), emulator::Access::StrongRead);
  return static_cast<T>(emulator::atomic_load(from, sizeof(T)));
#else
  T value;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];\n" : "=l"(value) : "l"(from) : "memory");
  }
  return value;
#endif
}

// st.relaxed.gpu of 4 or 8 bytes.
template <typename T>
CUKIT_DEVICE void store_relaxed(T* to, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "an integer");
#ifdef CUKIT_EMULATE
  *to = value;
#else
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;\n" ::"l"(to), "r"(value) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(to), "l"(value) : "memory");
  }
#endif
}

}  // namespace cukit
