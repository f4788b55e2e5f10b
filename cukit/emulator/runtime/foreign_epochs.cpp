#include "foreign_epochs.h"

#include <algorithm>

namespace cukit::emulator {

namespace {

using Epochs = std::shared_ptr<const std::vector<std::uint32_t>>;

bool covers(const Epochs& a, const Epochs& b) {
  return a == b || std::equal(b->begin(), b->end(), a->begin(),
                              [](std::uint32_t less, std::uint32_t more) { return less <= more; });
}

Epochs newest(const Epochs& a, const Epochs& b) {
  if (covers(a, b)) return a;
  if (covers(b, a)) return b;
  auto both = std::make_shared<std::vector<std::uint32_t>>(*a);
  for (std::size_t i = 0; i < both->size(); ++i) (*both)[i] = std::max((*both)[i], (*b)[i]);
  return both;
}

}  // namespace

ForeignEpochs merged(const ForeignEpochs& a, const ForeignEpochs& b) {
  if (b == nullptr || a == b) return a;
  if (a == nullptr) return b;
  std::vector<ClusterEpochs> parts;
  parts.reserve(a->size() + b->size());
  bool all_of_a = true;
  bool all_of_b = true;
  auto i = a->begin();
  auto j = b->begin();
  while (i != a->end() || j != b->end()) {
    if (j == b->end() || (i != a->end() && i->cluster < j->cluster)) {
      all_of_b = false;
      parts.push_back(*i++);
    } else if (i == a->end() || j->cluster < i->cluster) {
      all_of_a = false;
      parts.push_back(*j++);
    } else {
      parts.push_back({i->cluster, newest(i->seen, j->seen)});
      all_of_a = all_of_a && parts.back().seen == i->seen;
      all_of_b = all_of_b && parts.back().seen == j->seen;
      ++i;
      ++j;
    }
  }
  if (all_of_a) return a;
  if (all_of_b) return b;
  return std::make_shared<const std::vector<ClusterEpochs>>(std::move(parts));
}

ForeignEpochs foreign_epochs_of(std::uint32_t cluster, const std::uint32_t* seen, unsigned agents) {
  auto epochs = std::make_shared<const std::vector<std::uint32_t>>(seen, seen + agents);
  return std::make_shared<const std::vector<ClusterEpochs>>(
      1, ClusterEpochs{cluster, std::move(epochs)});
}

const std::vector<std::uint32_t>* epochs_of(const ForeignEpochs& epochs, std::uint32_t cluster) {
  if (epochs == nullptr) return nullptr;
  const auto found = std::lower_bound(
      epochs->begin(), epochs->end(), cluster,
      [](const ClusterEpochs& each, std::uint32_t number) { return each.cluster < number; });
  return found != epochs->end() && found->cluster == cluster ? found->seen.get() : nullptr;
}

}  // namespace cukit::emulator
