// A stack of its own and a way to switch to it.
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
  static constexpr std::size_t kGuardBytes = 64 * 1024;  // whatever the size of pages

  // `number` decides how far below the end of the memory the stack begins: what all fibers touch at
  // every switch would otherwise compete for the same few sets of the processor's caches.
  explicit Stack(std::size_t number);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  unsigned char* low() const { return low_; }
  unsigned char* high() const { return high_; }

 private:
  unsigned char* mapping_;
  unsigned char* low_;
  unsigned char* high_;
};

// The stack pointer that makes cukit_emulator_switch call `start` on the stack ending at `top`.
void* prepare_stack(unsigned char* top, void (*start)());

}  // namespace cukit::emulator
