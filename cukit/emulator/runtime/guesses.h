// Plain reads beside atomics whose value is nothing but a guess for atomicCAS:
//
//   old = *address;
//   do { assumed = old; old = atomicCAS(address, assumed, ...); } while (assumed != old);
//
// Formally the read is in a race with the others' atomics; but a wrong guess is found out by the
// atomicCAS. So a race of a plain read with an atomic is not reported at once. It is when the launch
// ends, unless some thread that read there went on with an atomicCAS to the same address, before
// its next barrier or fence.
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
  // The load at `call` (an offset in the kernel's code) reads guesses.
  void confirm(std::uint32_t call);
  // A race of the load at `call` with an atomic is reported later, if at all.
  template <typename Report>
  void postpone(std::uint32_t call, const Report& report) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (confirmed_.count(call) != 0 || !doubted_.insert(call).second) return;
    reports_.emplace_back(call, report());
  }
  // The first report of a load that reads no guesses; empty if there is none.
  std::string remaining() const;

 private:
  std::mutex mutex_;
  std::unordered_set<std::uint32_t> confirmed_, doubted_;
  std::vector<std::pair<std::uint32_t, std::string>> reports_;
};

// Whether a race between an access and an earlier one, which left this mark, may be one of a guess.
bool may_guess(const Actor& actor, std::size_t bytes, Access access, Mark earlier);
// The thread has read, or is about to, what it may use as a guess.
void note_guess(const void* pointer, std::uint32_t call);

}  // namespace cukit::emulator
