// The last use of each of a thread's registers, by wgmma or by ordinary code.
//
// Registers are local variables. wgmma takes the addresses of its accumulators and of operand a, so
// that these are on the thread's stack, where the checked mode records every access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace cukit::emulator {

// One word for every four bytes of the stack:
//   the number of the last wgmma fence before an ordinary access, or
//   kProduct + 2 * the number of the last wgmma that uses the register, + 1 for an accumulator.
// Fences and wgmmas are numbered across launches (ClusterRunner::register_events), so that words
// left by earlier threads on the same stack are older than any fence of the current thread.
class Registers {
 public:
  static constexpr std::uint32_t kProduct = 1u << 31;
  static constexpr std::uint32_t kAccumulator = 1;
  static constexpr std::uint32_t kMaxEvents = 1u << 29;

  Registers() = default;
  ~Registers() { std::free(words_); }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  // To be called for a new thread, which has executed no fence.
  void start() { watched_ = false; }
  // Clears all words, so that numbering can start again.
  void clear() {
    std::free(words_);
    words_ = nullptr;
    watched_ = false;
  }

  // True from the thread's first wgmma_fence on.
  bool watched() const { return watched_; }

  void fence(std::uint32_t number);
  // The thread has waited for all wgmmas up to this one.
  void complete(std::uint32_t product) { completed_ = mark(product, true); }

  // Records an ordinary access to bytes of the stack. False if it reads or writes an accumulator of
  // a wgmma in flight, or writes a register of its operand a.
  bool touch(std::size_t offset, std::size_t bytes, bool write) {
    for (std::size_t i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
      if (words_[i] <= completed_) {
        words_[i] = fence_;
      } else if (write || (words_[i] & kAccumulator) != 0) {
        return false;
      }
    }
    return true;
  }

  // Records that a wgmma uses `count` registers, starting at `offset`. Returns the index of the
  // first register that the wgmma must not use (accessed by ordinary code since the last fence, or
  // in flight in the other role), or `count`.
  std::size_t take(std::size_t offset, std::size_t count, std::uint32_t product, bool accumulator);

  bool in_flight(std::size_t offset) const { return words_[offset / 4] > completed_; }
  // The wgmma that a register is in flight for, and whether as an accumulator.
  std::uint32_t product_at(std::size_t offset) const {
    return (words_[offset / 4] & ~kProduct) >> 1;
  }
  bool accumulator_at(std::size_t offset) const {
    return (words_[offset / 4] & kAccumulator) != 0;
  }

 private:
  static std::uint32_t mark(std::uint32_t product, bool accumulator) {
    return kProduct | product << 1 | (accumulator ? kAccumulator : 0);
  }

  std::uint32_t* words_ = nullptr;
  std::uint32_t fence_ = 0;
  std::uint32_t completed_ = 0;
  bool watched_ = false;
};

}  // namespace cukit::emulator
