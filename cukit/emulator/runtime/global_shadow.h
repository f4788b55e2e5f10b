// What the checked mode records for global memory with global_races: for every element, its last
// write and two of its reads, by any thread of the launch.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "shadow.h"

namespace cukit::emulator {

struct Launch;
struct Module;

// An access to some of the bytes of a granule.
struct PastAccess {
  std::uint32_t cluster;
  std::uint32_t epoch;  // 0 if there was none
  std::uint32_t call;   // offset in the kernel's code
  std::uint16_t agent;
  std::uint8_t bytes;   // a bit for each byte accessed
  Mark mark;
};

// A granule is an element of up to four bytes. Accesses to different bytes of a granule do not
// conflict, but all bytes share one recorded write and two recorded reads (slot_for in shadow.h).
struct GlobalCell {
  PastAccess write;
  PastAccess reads[2];
};

class GlobalShadow {
 public:
  // Watches every array that the launch may write to, and the kernel's __device__ variables.
  void watch(const Launch& launch, const Module& module);
  // Ends the launch at a race. Accesses to memory that is not watched are ignored.
  void check(const Actor& actor, const void* pointer, std::size_t bytes, Access access);
  // Marks the thread's reads of these bytes since its last barrier or fence as guesses (guesses.h).
  void confirm_guesses(const Fiber& me, const void* pointer, std::size_t bytes);

 private:
  struct Free {
    void operator()(GlobalCell* cells) const { std::free(cells); }
  };
  struct Region {
    std::uintptr_t low, high;
    unsigned granule;
    std::unique_ptr<GlobalCell[], Free> cells;  // zero pages that the OS provides on first touch
  };
  // Calls visit(cell, mask of its bytes, its address) for each granule that an access touches.
  template <typename Visit>
  void visit(std::uintptr_t address, std::size_t bytes, const Visit& visit);

  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kLocks = 1024;

  std::vector<Region> regions_;  // sorted
  std::atomic_flag locks_[kLocks] = {};  // by 64-byte line; held while a cell is checked
};

}  // namespace cukit::emulator
