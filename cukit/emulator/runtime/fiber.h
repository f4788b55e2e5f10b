// A fiber's stack, and the switch between fibers.
#pragma once

#include <cstddef>

namespace cukit::emulator {

// Saves the caller's registers on its stack, leaves the stack pointer in *save, and continues where
// `load` was saved. No system call: about ten nanoseconds.
extern "C" void cukit_emulator_switch(void** save, void* load);

// A stack with inaccessible memory below it.
class Stack {
 public:
  static constexpr std::size_t kBytes = 256 * 1024;
  static constexpr std::size_t kGuardBytes = 64 * 1024;  // a multiple of every page size
  static constexpr std::size_t kSpreadBytes = 16 * 1024;

  // `number` varies where the stack starts in its mapping: otherwise the cache lines that every
  // fiber touches at a switch would compete for a few sets of the CPU's caches. In all threads that
  // call the same functions, a variable has the same distance from low(), which identifies wgmma's
  // registers.
  explicit Stack(std::size_t number);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  unsigned char* low() const { return low_; }
  unsigned char* high() const { return low_ + kBytes; }

 private:
  unsigned char* mapping_;
  unsigned char* low_;
};

// The stack pointer with which cukit_emulator_switch calls `start`, on the stack that ends at
// `top`.
void* prepare_stack(unsigned char* top, void (*start)());

}  // namespace cukit::emulator
