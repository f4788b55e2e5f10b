// What wgmma and ordinary code did last with a thread's registers.
//
// Registers are local variables. Those whose address is taken, as wgmma takes it of accumulators and of
// operand a, lie on the thread's stack, and the checked mode sees every access to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace cukit::emulator {

// For every four bytes of the stack a word:
//   the number of the fence that an ordinary access followed, or
//   kProduct + 2 * the number of the newest product that has the register, + 1 for an accumulator.
// Fences and products are counted from launch to launch (Cluster::register_events), so that words left
// by earlier threads on the same stack are older than any fence of this one.
class Registers {
 public:
  static constexpr std::uint32_t kProduct = 1u << 31;
  static constexpr std::uint32_t kAccumulator = 1;
  static constexpr std::uint32_t kMostEvents = 1u << 29;

  Registers() = default;
  ~Registers() { std::free(words_); }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  // A new thread has them: it has executed no fence.
  void start() { watched_ = false; }
  // Forgets all words, for numbers to begin anew.
  void clear() {
    std::free(words_);
    words_ = nullptr;
    watched_ = false;
  }

  // True from the thread's first wgmma_fence on.
  bool watched() const { return watched_; }

  void fence(std::uint32_t number);
  // The thread has waited for all products up to this one.
  void land(std::uint32_t product) { landed_ = mark(product, true); }

  // An ordinary access to bytes of the stack. False if a product in flight may change one of the
  // registers, or the access one that the product reads.
  bool touch(std::size_t offset, std::size_t bytes, bool write) {
    for (std::size_t i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
      if (words_[i] <= landed_) {
        words_[i] = fence_;
      } else if (write || (words_[i] & kAccumulator) != 0) {
        return false;
      }
    }
    return true;
  }

  // A product takes `count` registers from `offset` on. The first of them that it may not take, or
  // `count`: touched by ordinary code since the last fence, or in flight in the other role.
  std::size_t take(std::size_t offset, std::size_t count, std::uint32_t product, bool accumulator);

  bool in_flight(std::size_t offset) const { return words_[offset / 4] > landed_; }
  // The product that has a register in flight, and whether as an accumulator.
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
  std::uint32_t landed_ = 0;
  bool watched_ = false;
};

}  // namespace cukit::emulator
