#include "clocks.h"

#include <algorithm>

namespace cukit::emulator {

ClockPool::~ClockPool() { reset(0); }

void ClockPool::reset(unsigned agents) {
  if (agents == agents_) {
    free_ = all_;
    for (Clock* clock : all_) forget(*clock);
    return;
  }
  for (Clock* clock : all_) {
    delete[] clock->seen;
    delete clock;
  }
  all_.clear();
  free_.clear();
  agents_ = agents;
}

Clock* ClockPool::allocate() {
  if (free_.empty()) {
    all_.push_back(new Clock{0, new std::uint32_t[agents_], {}, {}, {}});
    free_.push_back(all_.back());
  }
  Clock* clock = free_.back();
  free_.pop_back();
  clock->references = 1;
  return clock;
}

Clock* ClockPool::filled(std::uint32_t epoch) {
  Clock* clock = allocate();
  std::fill_n(clock->seen, agents_, epoch);
  return clock;
}

Clock* ClockPool::copy(const Clock* from) {
  Clock* clock = allocate();
  std::copy_n(from->seen, agents_, clock->seen);
  clock->foreign = from->foreign;
  clock->published = from->published;
  clock->published_in_block = from->published_in_block;
  return clock;
}

void ClockPool::merge(Clock* into, const Clock* from) const {
  if (into == from) return;
  std::uint32_t* const to = into->seen;
  const std::uint32_t* const other = from->seen;
  for (unsigned i = 0; i < agents_; ++i) to[i] = std::max(to[i], other[i]);
  into->foreign = merged(into->foreign, from->foreign);
  into->published = merged(into->published, from->published);
  into->published_in_block = merged(into->published_in_block, from->published_in_block);
}

}  // namespace cukit::emulator
