// Vector clocks: for each thread, the epoch of every other agent up to which it is ordered after
// that agent's accesses.
//
// Agents are the threads of a cluster and its engines, which copy and multiply asynchronously.
// Agent i is at epoch e_i; an access by agent i in epoch e happened before one by agent j iff
// e <= seen_j[i]. Threads that met at a barrier share one array, which is never changed afterwards.
#pragma once

#include <cstdint>
#include <vector>

#include "foreign_epochs.h"

namespace cukit::emulator {

struct Clock {
  unsigned references;
  std::uint32_t* seen;
  ForeignEpochs foreign;  // of other clusters
  // Accesses that the last fences make visible to threads that read a later atomic write: fences of
  // device scope to any thread, all fences to threads of the same block or cluster.
  ForeignEpochs published;
  ForeignEpochs published_in_block;
};

class ClockPool {
 public:
  ~ClockPool();

  // Discards all clocks; later ones have `agents` entries.
  void reset(unsigned agents);

  // A clock with every entry `epoch`, or a copy; either has one reference.
  Clock* filled(std::uint32_t epoch);
  Clock* copy(const Clock* from);

  static Clock* hold(Clock* clock) {
    ++clock->references;
    return clock;
  }
  void release(Clock* clock) {
    if (clock == nullptr || --clock->references > 0) return;
    forget(*clock);
    free_.push_back(clock);
  }

  // into = max(into, from), entry by entry.
  void merge(Clock* into, const Clock* from) const;

 private:
  static void forget(Clock& clock) {
    clock.foreign.reset();
    clock.published.reset();
    clock.published_in_block.reset();
  }
  Clock* allocate();

  unsigned agents_ = 0;
  std::vector<Clock*> all_, free_;
};

}  // namespace cukit::emulator
