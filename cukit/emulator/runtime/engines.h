// The units that copy and multiply beside the threads.
#pragma once

#include "block.h"

namespace cukit::emulator {

// Each engine is an agent of its own (clocks.h). Copies that report to one mbarrier share one, so do a
// thread's stores and a warp's products.
constexpr unsigned kMbarrierEngines = 16;
constexpr unsigned kStoreEngines = 16;
constexpr unsigned kProductEngines = 32;
static_assert(kMbarrierEngines + kStoreEngines + kProductEngines == kEngines, "every agent is one");

// A copy of `bytes` to `to`, in the shared memory of `target`, that reports to that block's mbarrier.
void land_later(Fiber& me, Block& target, std::uint32_t barrier_address, unsigned char* to,
                unsigned bytes, unsigned swizzle, Work work);
// A copy out of shared memory, in the thread's open bulk group.
void read_later(Fiber& me, const Place& place, unsigned bytes, Work work);
// The thread has waited for what the engine did in this epoch.
void learn_of_engine(Fiber& me, unsigned engine, std::uint32_t epoch);

// The same place in another block of the cluster.
inline unsigned char* place_in(const Fiber& me, const Block& target, std::uint32_t shared,
                               unsigned bytes) {
  const std::uint32_t local = local_address(shared);
  return place_of(me, target.rank == me.block->rank ? local : map_to_rank(local, target.rank), bytes)
      .pointer;
}

// The blocks of a multicast, by the bits of `blocks`; 0 stands for the caller's own.
template <typename Visit>
void for_targets(Fiber& me, unsigned blocks, const Visit& visit) {
  if (blocks == 0) {
    visit(*me.block);
    return;
  }
  Cluster& cluster = *me.block->cluster;
  for (unsigned rank = 0; rank < cluster.num_blocks; ++rank) {
    if (blocks >> rank & 1) visit(*cluster.blocks[rank]);
  }
}

}  // namespace cukit::emulator
