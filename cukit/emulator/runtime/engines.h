// Engines: the asynchronous units that copy and multiply while the threads run.
#pragma once

#include "block.h"

namespace cukit::emulator {

// Each engine is an agent (clocks.h). Copies that complete on one mbarrier share an engine, and so
// do a thread's bulk stores and a warp's wgmmas.
constexpr unsigned kMbarrierEngines = 16;
constexpr unsigned kStoreEngines = 16;
constexpr unsigned kProductEngines = 32;
static_assert(kMbarrierEngines + kStoreEngines + kProductEngines == kEngines, "all engines");

// For messages: what engine `number` does.
inline std::string name_of_engine(unsigned number) {
  return number < kMbarrierEngines                  ? "an asynchronous copy to shared memory"
         : number < kMbarrierEngines + kStoreEngines ? "an asynchronous copy out of shared memory"
                                                     : "wgmma, which runs asynchronously,";
}

// Starts a copy of `bytes` bytes to `to`, in the shared memory of the block `target`; the copy
// completes on an mbarrier of the same block.
void start_inbound_copy(Fiber& me, Block& target, std::uint32_t barrier_address, unsigned char* to,
                unsigned bytes, unsigned swizzle, Work work);
// Starts a copy out of shared memory, in the thread's open bulk group.
void start_outbound_copy(Fiber& me, const Place& place, unsigned bytes, Work work);
// The thread has waited for everything that the engine did up to this epoch.
void order_after_engine(Fiber& me, unsigned engine, std::uint32_t epoch);
// Ends the launch: ordinary code accesses registers of a wgmma in flight.
[[noreturn]] void touched_in_flight(const Fiber& me, const void* pointer, std::size_t bytes,
                                    Access access);
// Ends the launch: the thread exits while a wgmma of its warpgroup is in flight.
[[noreturn]] void exit_before_products(const Fiber& me);

// The array of a tensor map that is a parameter of the launch or a member of one.
struct MappedArray {
  std::uintptr_t low, high;
  unsigned argument;
  unsigned element_bytes;
  bool writeable;
};
std::vector<MappedArray> arrays_of_maps(const Launch& launch);

// Records an access of the thread to its own stack, where its registers are.
inline void touch(Fiber& me, const void* pointer, std::size_t bytes, Access access) {
  if (!me.registers.watched()) return;
  const auto place = static_cast<std::size_t>(static_cast<const unsigned char*>(pointer) -
                                              me.stack_low);
  if (!me.registers.touch(place, bytes, access != Access::Read)) {
    touched_in_flight(me, pointer, bytes, access);
  }
}
inline bool on_stack(const Fiber& me, const void* pointer) {
  return static_cast<std::size_t>(static_cast<const unsigned char*>(pointer) - me.stack_low) <
         Stack::kBytes;
}
// Records an instruction's access to registers, which the compiler does not instrument.
inline void use_registers(Fiber& me, const void* pointer, std::size_t bytes, Access access) {
  if (on_stack(me, pointer)) touch(me, pointer, bytes, access);
}

// The same offset in the shared memory of another block of the cluster.
inline unsigned char* place_in(const Fiber& me, const Block& target, std::uint32_t shared,
                               unsigned bytes) {
  const std::uint32_t local = local_address(shared);
  return place_of(me, target.rank == me.block->rank ? local : map_to_rank(local, target.rank), bytes)
      .pointer;
}

// Visits the blocks of a multicast: the set bits of `blocks`, or the caller's own block if it is 0.
template <typename Visit>
void for_targets(Fiber& me, unsigned blocks, const Visit& visit) {
  if (blocks == 0) {
    visit(*me.block);
    return;
  }
  ClusterRunner& cluster = *me.block->cluster;
  for (unsigned rank = 0; rank < cluster.num_blocks; ++rank) {
    if (blocks >> rank & 1) visit(*cluster.blocks[rank]);
  }
}

}  // namespace cukit::emulator
