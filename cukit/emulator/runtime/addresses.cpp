// The 32-bit addresses of shared memory that instructions take, in this block and in its cluster.
#include "block.h"

namespace cukit::emulator {

namespace {

// Static shared memory starts at 0, and dynamic follows, as on the GPU; a matrix descriptor's 18
// bits cover both. In a shared::cluster address the top byte is the block's rank plus one.
constexpr unsigned kRankShift = 24;
constexpr std::uint32_t kAlignment = 1024;

std::uint32_t first_dynamic(const ClusterRunner& cluster) {
  const auto static_bytes = static_cast<std::uint32_t>(cluster.module->static_bytes);
  return (static_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::uint32_t shared_address(const void* pointer) {
  CUKIT_ENTER(me);
  Block& block = *me.block;
  const auto* at = static_cast<const unsigned char*>(pointer);
  const Launch& launch = *block.cluster->launch;
  // One past the end is a valid address, too.
  if (at >= block.dynamic_shared && at <= block.dynamic_shared + launch.dynamic_bytes) {
    return first_dynamic(*block.cluster) + static_cast<std::uint32_t>(at - block.dynamic_shared);
  }
  const std::size_t static_bytes = block.cluster->module->static_bytes;
  if (static_bytes > 0 && at >= block.static_shared && at <= block.static_shared + static_bytes) {
    return static_cast<std::uint32_t>(at - block.static_shared);
  }
  fault("not in shared memory: __cvta_generic_to_shared needs a pointer to shared memory\n  " +
        name_of(me) + " " + where(me.call));
}

std::uint32_t map_to_rank(std::uint32_t address, unsigned rank) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "mapa");
  if (rank >= me.cluster_blocks) {
    fault(format("out of bounds: rank %u in a cluster of %u blocks\n  ", rank, me.cluster_blocks) +
          name_of(me) + " " + where(me.call));
  }
  return local_address(address) | (rank + 1) << kRankShift;
}

std::uint32_t local_address(std::uint32_t address) { return address & ((1u << kRankShift) - 1); }

Place place_of(const Fiber& me, std::uint32_t address, std::size_t bytes) {
  ClusterRunner& cluster = *me.block->cluster;
  const unsigned tag = address >> kRankShift;
  if (tag > cluster.num_blocks) {
    fault(format("out of bounds: 0x%08x is not a shared memory address of this cluster\n  ",
                 address) +
          name_of(me) + " " + where(me.call));
  }
  Block& block = tag == 0 ? *me.block : *cluster.blocks[tag - 1];
  if (block.live == 0) {
    fault(format("access to the shared memory of the block of rank %u, which has exited: put a "
                 "cluster barrier before its exit\n  ", block.rank) +
          name_of(me) + " " + where(me.call));
  }
  const std::uint32_t at = local_address(address);
  const std::uint32_t dynamic = first_dynamic(cluster);
  const std::size_t dynamic_bytes = cluster.launch->dynamic_bytes;
  const std::size_t static_bytes = cluster.module->static_bytes;
  if (at >= dynamic && at - dynamic + bytes <= dynamic_bytes) {
    return {&block, block.dynamic_shared + (at - dynamic)};
  }
  if (at < dynamic && at + bytes <= static_bytes) {
    const bool here = cluster.num_blocks == 1 || cluster.resident == &block;
    return {&block, (here ? block.static_shared : block.static_copy.data()) + at};
  }
  fault(format("out of bounds: %zu bytes at byte %u of the %s shared memory of %zu bytes\n  ", bytes,
               at >= dynamic ? at - dynamic : at, at >= dynamic ? "dynamic" : "static",
               at >= dynamic ? dynamic_bytes : static_bytes) +
        name_of(me) + " " + where(me.call));
}

}  // namespace cukit::emulator
