// L2 eviction priorities of global loads (sm_80), and L2 prefetches.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// createpolicy: returns a cache policy to pass to loads. L2 evicts the lines loaded with this
// policy last (evict_last).
CUKIT_DEVICE unsigned long long create_policy_evict_last() {
#ifdef CUKIT_EMULATE
  return 0;
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
#endif
}

// The same with lines evicted first (evict_first): for data that is read once.
CUKIT_DEVICE unsigned long long create_policy_evict_first() {
#ifdef CUKIT_EMULATE
  return 0;
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
#endif
}

// The same with the default priority (evict_normal).
CUKIT_DEVICE unsigned long long create_policy_evict_normal() {
#ifdef CUKIT_EMULATE
  return 0;
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
#endif
}

// ld.global.L2::cache_hint, 16 bytes. `global` is 16-byte aligned.
CUKIT_DEVICE uint4 load_global_16(const uint4* global, unsigned long long policy) {
#ifdef CUKIT_EMULATE
  return *global;
#else
  uint4 word;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(global), "l"(policy));
  return word;
#endif
}

// prefetch.global.L2: prefetches the cache line at `address`. A hint; completion is not reported.
CUKIT_DEVICE void prefetch_l2(const void* address) {
#ifndef CUKIT_EMULATE
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
#endif
}

}  // namespace cukit
