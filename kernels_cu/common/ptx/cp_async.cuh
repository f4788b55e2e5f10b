// cp.async: asynchronous copies from global to shared memory (sm_80).
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit {

// cp.async.cg, 16 bytes, bypassing L1. With `valid` false the destination becomes zeros and
// `global` is not read. Both addresses are 16-byte aligned.
CUKIT_DEVICE void cp_async_16(unsigned shared, const void* global, bool valid = true) {
#ifdef CUKIT_EMULATE
  emulator::cp_async(shared, global, 16, valid ? 16 : 0);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#endif
}

// cp_async_16 with an L2 prefetch of the surrounding 256 bytes.
CUKIT_DEVICE void cp_async_16_prefetch_256(unsigned shared, const void* global, bool valid = true) {
#ifdef CUKIT_EMULATE
  cp_async_16(shared, global, valid);
#else
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
#endif
}

// cp_async_16 of the first `present` bytes; the rest of the destination becomes zeros.
CUKIT_DEVICE void cp_async_16_partial(unsigned shared, const void* global, int present) {
#ifdef CUKIT_EMULATE
  emulator::cp_async(shared, global, 16, present);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(present)
               : "memory");
#endif
}

// cp.async.ca, 4, 8 or 16 bytes, through L1: for data that other threads of the SM read too.
template <int Bytes>
CUKIT_DEVICE void cp_async_cached(unsigned shared, const void* global, bool valid) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "three sizes of copies");
#ifdef CUKIT_EMULATE
  emulator::cp_async(shared, global, Bytes, valid ? Bytes : 0);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared), "l"(global),
               "n"(Bytes), "r"(valid ? Bytes : 0)
               : "memory");
#endif
}

// cp_async_16 with an L2 eviction priority (createpolicy).
CUKIT_DEVICE void cp_async_16_policy(unsigned shared, const void* global,
                                     unsigned long long policy) {
#ifdef CUKIT_EMULATE
  emulator::cp_async(shared, global, 16, 16);
#else
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "l"(policy)
               : "memory");
#endif
}

// cp.async.mbarrier.arrive.noinc: arrives at `barrier` once this thread's copies so far have
// completed; counts as one of the arrivals given to mbarrier_init.
CUKIT_DEVICE void cp_async_arrive(Mbarrier* barrier) {
#ifdef CUKIT_EMULATE
  emulator::cp_async_commit();
  emulator::cp_async_wait(0);
  emulator::mbarrier_arrive(shared_address(barrier), 0);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// cp.async.commit_group: commits this thread's copies since the last commit as a group.
CUKIT_DEVICE void cp_async_commit() {
#ifdef CUKIT_EMULATE
  emulator::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// cp.async.wait_group: waits until at most `Pending` of this thread's groups are unfinished. Other
// threads see the data after a barrier.
template <int Pending>
CUKIT_DEVICE void cp_async_wait() {
#ifdef CUKIT_EMULATE
  emulator::cp_async_wait(Pending);
#else
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
#endif
}

}  // namespace cukit
