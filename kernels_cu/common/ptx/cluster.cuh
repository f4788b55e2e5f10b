// Thread-block clusters (PTX ISA 7.8, sm_90 and up): blocks scheduled together, each able to write
// the others' shared memory.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit {

// Rank of this block in its cluster.
CUKIT_DEVICE int cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// First half of a barrier over all threads of the cluster; what was written before it is visible
// after the others' cluster_wait, remote shared memory included.
CUKIT_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Second half: waits until every thread of the cluster has arrived.
CUKIT_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes a float to the place that `local`, an address in this block's shared memory, has in the
// shared memory of block `rank` of the cluster. That block must have started and not yet exited.
CUKIT_DEVICE void store_remote(float* local, int rank, float value) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(local)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

}  // namespace cukit
