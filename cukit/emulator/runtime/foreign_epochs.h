// The accesses of other clusters that a thread is ordered after, and those that it publishes. They
// pass from one cluster to another only through fences and atomics.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace cukit::emulator {

// For each agent of a cluster, the last epoch whose accesses are known to have happened.
struct ClusterEpochs {
  std::uint32_t cluster;
  std::shared_ptr<const std::vector<std::uint32_t>> seen;
};

// The epochs of several clusters, in order of their numbers; null if there are none.
using ForeignEpochs = std::shared_ptr<const std::vector<ClusterEpochs>>;

// Accesses published at one address: to all threads, and to threads of the block or cluster of the
// publishing thread.
struct Published {
  ForeignEpochs everywhere;
  ForeignEpochs in_block;
};

// The union. Returns one of the arguments unchanged if it covers the other.
ForeignEpochs merged(const ForeignEpochs& a, const ForeignEpochs& b);
ForeignEpochs foreign_epochs_of(std::uint32_t cluster, const std::uint32_t* seen, unsigned agents);
// The epochs of a cluster's agents, or null if there are none.
const std::vector<std::uint32_t>* epochs_of(const ForeignEpochs& epochs, std::uint32_t cluster);

}  // namespace cukit::emulator
