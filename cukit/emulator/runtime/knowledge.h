// What a thread knows of other clusters, and what it publishes: through fences and atomics, the only way
// from one cluster to another.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace cukit::emulator {

// The epochs of a cluster's agents up to which their accesses have happened.
struct Part {
  std::uint32_t cluster;
  std::shared_ptr<const std::vector<std::uint32_t>> seen;
};

// Parts of several clusters in order of their numbers; null where nothing is known.
using Knowledge = std::shared_ptr<const std::vector<Part>>;

// What was published at one address: to everybody, and to the threads of each block.
struct Published {
  Knowledge everywhere;
  Knowledge in_block;
};

// What either knows. One of the two as it is, if it knows everything that the other does.
Knowledge merged(const Knowledge& a, const Knowledge& b);
Knowledge knowledge_of(std::uint32_t cluster, const std::uint32_t* seen, unsigned agents);
// The epochs that are known of a cluster, or null.
const std::vector<std::uint32_t>* part_of(const Knowledge& knowledge, std::uint32_t cluster);

}  // namespace cukit::emulator
