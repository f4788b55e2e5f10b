#include "registers.h"

#include <algorithm>
#include <new>

#include "fiber.h"

namespace cukit::emulator {

void Registers::fence(std::uint32_t number) {
  if (!watched_) {
    if (words_ == nullptr) {
      // Zero pages that the OS provides on first touch.
      words_ = static_cast<std::uint32_t*>(std::calloc(Stack::kBytes / 4, sizeof(std::uint32_t)));
      if (words_ == nullptr) throw std::bad_alloc();
    }
    watched_ = true;
    complete(number);
  }
  fence_ = number;
}

std::size_t Registers::take(std::size_t offset, std::size_t count, std::uint32_t product,
                            bool accumulator) {
  std::uint32_t* const words = words_ + offset / 4;
  const std::uint32_t other_role = accumulator ? 0 : kAccumulator;
  const auto refused = [=](std::uint32_t word) {
    return (word == fence_) | ((word > completed_) & ((word & kAccumulator) == other_role));
  };
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) any |= refused(words[i]);
  if (any) return static_cast<std::size_t>(std::find_if(words, words + count, refused) - words);
  std::fill_n(words, count, mark(product, accumulator));
  return count;
}

}  // namespace cukit::emulator
