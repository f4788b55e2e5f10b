// Plain reads that race with atomics, but whose value is only a first guess for atomicCAS:
//
//   old = *address;
//   do { assumed = old; old = atomicCAS(address, assumed, ...); } while (assumed != old);
//
// Formally the read is a race with the other threads' atomics, but the atomicCAS detects a wrong
// guess. A race of a plain read with an atomic is therefore reported only when the launch ends, and
// not at all if a thread, after the read, executed an atomicCAS on the same address before its next
// barrier or fence.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "shadow.h"

namespace cukit::emulator {

class Guesses {
 public:
  // The load at `call` (an offset in the kernel's code) reads a guess.
  void confirm(std::uint32_t call);
  // A race of the load at `call` with an atomic is reported later, if at all.
  template <typename Report>
  void postpone(std::uint32_t call, const Report& report) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (confirmed_.count(call) != 0 || !doubted_.insert(call).second) return;
    reports_.emplace_back(call, report());
  }
  // The first report of a load that is not known to read a guess; empty if there is none.
  std::string remaining() const;

 private:
  std::mutex mutex_;
  std::unordered_set<std::uint32_t> confirmed_, doubted_;
  std::vector<std::pair<std::uint32_t, std::string>> reports_;
};

// Whether a race between an access and an earlier one, recorded with this mark, may be due to a
// guess.
bool may_guess(const Actor& actor, std::size_t bytes, Access access, Mark earlier);
// Records that the load from `pointer`, which the current thread executes at `call`, may read a
// guess.
void note_guess(const void* pointer, std::uint32_t call);

}  // namespace cukit::emulator
