// What the checked mode knows of global memory where it looks for races there: for every element who
// wrote it last, and who read it since, of all threads of the launch.
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
struct Past {
  std::uint32_t cluster;
  std::uint32_t epoch;  // 0 if there was none
  std::uint32_t call;   // offset in the kernel's code
  std::uint16_t agent;
  std::uint8_t bytes;   // a bit for each
  Mark mark;
};

// A granule is an element of up to four bytes. Accesses to a part of it are told apart by their bytes, but
// only the last of each kind is remembered.
struct GlobalCell {
  Past write;
  Past reads[2];
};

class GlobalShadow {
 public:
  // Every array that the launch may write to, and the kernel's __device__ variables.
  void watch(const Launch& launch, const Module& module);
  // Ends the launch at a race. Memory that is not watched is never in one.
  void check(const Actor& actor, const void* pointer, std::size_t bytes, Access access);
  // What the thread has read here, since its last barrier or fence, was a guess (guesses.h).
  void confirm_guesses(const Fiber& me, const void* pointer, std::size_t bytes);

 private:
  struct Free {
    void operator()(GlobalCell* cells) const { std::free(cells); }
  };
  struct Region {
    std::uintptr_t low, high;
    unsigned granule;
    std::unique_ptr<GlobalCell[], Free> cells;  // zeros that the system provides as they are touched
  };
  // Calls visit(cell, mask of its bytes, its address) for the granules that an access touches, each alone.
  template <typename Visit>
  void visit(std::uintptr_t address, std::size_t bytes, const Visit& visit);

  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kLocks = 1024;

  std::vector<Region> regions_;  // sorted
  std::atomic_flag locks_[kLocks] = {};  // of lines; held while a cell is judged
};

}  // namespace cukit::emulator
