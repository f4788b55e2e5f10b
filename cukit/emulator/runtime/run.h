// A launch in progress: the clusters still to do, and the first fault that any worker found.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "block.h"
#include "guards.h"

namespace cukit::emulator {

struct Run {
  const Launch* launch;
  Module module;
  std::uint64_t clusters;
  std::uint64_t clusters_along[3];
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> faulty{false};
  std::mutex mutex;
  std::uint32_t interrupts_before;
  std::string message;

  bool failed() const { return faulty.load(std::memory_order_relaxed); }
  bool interrupted() const {
    return launch->interruptible != 0 && interrupts() != interrupts_before;
  }
  // Whether workers should leave what they do.
  bool stopped() const { return failed() || interrupted(); }
  void record(const std::string& text);
  // Counts a poll, and ends the launch when the thread has done nothing else for too long.
  void check_patience(Fiber& me) const;
};

std::size_t fiber_bytes();
// The fiber that lies at the top of its stack.
Fiber& fiber_of(const Stack& stack);
void prepare_shared(Block& block, unsigned rank);

}  // namespace cukit::emulator
