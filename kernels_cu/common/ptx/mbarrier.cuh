// mbarrier: a barrier in shared memory that counts arrivals of threads and bytes of copies (sm_90).
//
// A phase completes once the number of arrivals given to mbarrier_init has been reached and all
// bytes announced in the phase have been copied. Phases alternate in parity, starting with 0: a
// wait for parity p returns once the latest phase of that parity has completed, immediately for
// parity 1 of a new barrier.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit {

// 8 bytes of shared memory, 8-byte aligned.
struct Mbarrier {
  unsigned long long state;
};

// mbarrier.init: one thread, before a barrier of all threads that use it.
CUKIT_DEVICE void mbarrier_init(Mbarrier* barrier, unsigned arrivals) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_init(shared_address(barrier), arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}

// fence.mbarrier_init: makes initialisations visible to the cluster and to TMA.
CUKIT_DEVICE void fence_mbarrier_init() {
#ifdef CUKIT_EMULATE
  emulator::fence_mbarrier_init();
#else
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

// mbarrier.arrive
CUKIT_DEVICE void mbarrier_arrive(Mbarrier* barrier) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_arrive(shared_address(barrier), 0);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// mbarrier.arrive at the corresponding barrier of block `rank` of the cluster.
CUKIT_DEVICE void mbarrier_arrive_remote(Mbarrier* barrier, int rank) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_arrive(emulator::map_to_rank(shared_address(barrier), rank), 0);
#else
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
               : "=r"(remote)
               : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(remote)
               : "memory");
#endif
}

// The same without ordering this thread's earlier accesses (a release costs a memory fence of GPU
// scope): for a stage that only completed wgmmas have read.
CUKIT_DEVICE void mbarrier_arrive_remote_relaxed(Mbarrier* barrier, int rank) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_arrive_relaxed(emulator::map_to_rank(shared_address(barrier), rank));
#else
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
               : "=r"(remote)
               : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(remote)
               : "memory");
#endif
}

// mbarrier.arrive.expect_tx: arrives, and announces `bytes` of copies in this phase.
CUKIT_DEVICE void mbarrier_arrive_expect(Mbarrier* barrier, unsigned bytes) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_arrive(shared_address(barrier), bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// mbarrier.try_wait.parity, repeated until the phase of that parity has completed. Writes of the
// copies and of the arriving threads are then visible.
CUKIT_DEVICE void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_wait(shared_address(barrier), parity);
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// The same, also for writes of other blocks of the cluster.
CUKIT_DEVICE void mbarrier_wait_cluster(Mbarrier* barrier, unsigned parity) {
#ifdef CUKIT_EMULATE
  emulator::mbarrier_wait(shared_address(barrier), parity);
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace cukit
