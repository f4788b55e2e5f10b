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

// For messages: what engine `number` does.
inline std::string name_of_engine(unsigned number) {
  return number < kMbarrierEngines                  ? "an asynchronous copy to shared memory"
         : number < kMbarrierEngines + kStoreEngines ? "an asynchronous copy out of shared memory"
                                                     : "wgmma, which runs asynchronously,";
}

// A copy of `bytes` to `to`, in the shared memory of `target`, that reports to that block's mbarrier.
void land_later(Fiber& me, Block& target, std::uint32_t barrier_address, unsigned char* to,
                unsigned bytes, unsigned swizzle, Work work);
// A copy out of shared memory, in the thread's open bulk group.
void read_later(Fiber& me, const Place& place, unsigned bytes, Work work);
// The thread has waited for what the engine did in this epoch.
void learn_of_engine(Fiber& me, unsigned engine, std::uint32_t epoch);
// Ends the launch: ordinary code touches registers that products in flight have.
[[noreturn]] void touched_in_flight(const Fiber& me, const void* pointer, std::size_t bytes,
                                    Access access);
// Ends the launch: nobody has waited for products of the thread's warpgroup.
[[noreturn]] void exit_before_products(const Fiber& me);

// The array of a tensor map among the launch's parameters, or inside of one.
struct MappedArray {
  std::uintptr_t low, high;
  unsigned argument;
  unsigned element_bytes;
  bool writeable;
};
std::vector<MappedArray> arrays_of_maps(const Launch& launch);

// An access of the thread to its own stack, where its registers are.
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
// What an instruction does with registers, which the compiler's instrumentation does not see.
inline void use_registers(Fiber& me, const void* pointer, std::size_t bytes, Access access) {
  if (on_stack(me, pointer)) touch(me, pointer, bytes, access);
}

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
