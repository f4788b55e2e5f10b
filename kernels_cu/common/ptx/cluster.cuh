// Thread-block clusters (PTX ISA 7.8, sm_90 and up): blocks that run at the same time and can
// access each other's shared memory.
//
// CUKIT_CLUSTER_SHAPE   qualifier of a kernel; macro CLUSTER is the number of blocks per cluster
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/shared_address.cuh"

#if defined(CLUSTER) && CLUSTER > 1
#define CUKIT_CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CUKIT_CLUSTER_SHAPE
#endif

namespace cukit {

// Rank of this block in its cluster.
CUKIT_DEVICE int cluster_rank() {
#ifdef CUKIT_EMULATE
  return static_cast<int>(CUKIT_OF_SELF(cluster_rank));
#else
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#endif
}

// First half of a barrier over all threads of the cluster; earlier writes, also those to remote
// shared memory, are visible to the other threads after their cluster_wait.
CUKIT_DEVICE void cluster_arrive() {
#ifdef CUKIT_EMULATE
  emulator::cluster_arrive();
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Second half: waits until every thread of the cluster has arrived.
CUKIT_DEVICE void cluster_wait() {
#ifdef CUKIT_EMULATE
  emulator::cluster_wait();
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes a float to the shared memory of block `rank` of the cluster, at the address that
// corresponds to `local` in this block. That block must have started and not yet exited.
CUKIT_DEVICE void store_remote(float* local, int rank, float value) {
#ifdef CUKIT_EMULATE
  emulator::store_remote(emulator::map_to_rank(shared_address(local), rank), __float_as_uint(value));
#else
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(local)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

// atom.add.u32 at the address that corresponds to `local` in the shared memory of block `rank`,
// which may be this block; returns the old value. Atomic with that block's own atomicAdd.
CUKIT_DEVICE unsigned fetch_add_remote(unsigned* local, int rank, unsigned value) {
#ifdef CUKIT_EMULATE
  return emulator::fetch_add_remote(emulator::map_to_rank(shared_address(local), rank), value);
#else
  unsigned remote, old;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(local)), "r"(rank));
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(remote), "r"(value)
               : "memory");
  return old;
#endif
}

// st.async: stores 16 bytes asynchronously, to the same place as store_remote; the store completes
// at the mbarrier that corresponds to `barrier` in that block. `local` is 16-byte aligned.
CUKIT_DEVICE void store_async_remote(float4* local, int rank, const float4& value,
                                     Mbarrier* barrier) {
#ifdef CUKIT_EMULATE
  emulator::store_async(emulator::map_to_rank(shared_address(local), rank), &value,
                        shared_address(barrier));
#else
  unsigned remote, remote_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(local)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote_barrier)
               : "r"(shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
          "r"(remote),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(remote_barrier)
      : "memory");
#endif
}

}  // namespace cukit
