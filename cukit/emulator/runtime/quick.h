// The fast path of plain loads and stores: a few comparisons prove most accesses correct. All other
// accesses, including every error, go to check() (shadow.cpp), which repeats the checks in full.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"
#include "run.h"

namespace cukit::emulator {

// The state of the accessing thread.
struct QuickCheck {
  const std::uint32_t* seen;
  std::uint32_t base_epoch, epoch, call;
  std::uint16_t agent;

  bool ordered(unsigned earlier, std::uint32_t at) const {
    return at <= base_epoch || earlier == agent || at <= seen[earlier];
  }
  // Whether the cell has only ordinary reads, and a write that is ordered before this access.
  bool plain(const Cell& cell) const {
    return (static_cast<unsigned>(cell.mark[0]) | static_cast<unsigned>(cell.mark[1]) | cell.pending) == 0 &&
           ordered(cell.writer, cell.write_epoch);
  }
  bool read(Cell& cell) const {
    if (cell.write_epoch <= base_epoch || !plain(cell)) return false;
    const int slot = ordered(cell.reader[0], cell.read_epoch[0]) ? 0 : 1;
    cell.reader[slot] = agent;
    cell.read_epoch[slot] = epoch;
    cell.read_call[slot] = call;
    return true;
  }
  bool write(Cell& cell, bool may_be_first) const {
    if ((cell.write_epoch <= base_epoch && !may_be_first) || !plain(cell) ||
        !ordered(cell.reader[0], cell.read_epoch[0]) || !ordered(cell.reader[1], cell.read_epoch[1])) {
      return false;
    }
    cell.writer = agent;
    cell.write_epoch = epoch;
    cell.write_call = call;
    cell.generic = 1;
    cell.swizzle = 0;
    return true;
  }
};
static_assert(static_cast<unsigned>(Mark::Plain) == 0);

inline bool quick_global(Fiber& me, const unsigned char* at, std::size_t bytes, bool write) {
  Block& block = *me.block;
  const Known* const known = write ? block.shadow.writeable : block.shadow.readable;
  for (unsigned i = 0; i < Shadow::kKnown; ++i) {
    const auto offset = static_cast<std::size_t>(at - known[i].low);
    if (offset >= known[i].bytes || offset + bytes > known[i].bytes) continue;
    if (write) ++block.cluster->steps;
    if (block.global_races) {
      block.cluster->run->global.check(thread_actor(me), at, bytes, write ? Access::Write : Access::Read);
    }
    return true;
  }
  return false;
}

// True if the access is correct; it is then recorded. Not for accesses to the thread's own stack.
inline __attribute__((always_inline)) bool quick(Fiber& me, const void* pointer, std::size_t bytes, bool write) {
  Block& block = *me.block;
  const auto* const at = static_cast<const unsigned char*>(pointer);
  Cells* cells = &block.shadow.dynamic_cells;
  std::size_t limit = block.dynamic_bytes;
  auto byte = static_cast<std::size_t>(at - block.dynamic_shared);
  const bool dynamic = byte < limit;
  if (!dynamic) {
    cells = &block.shadow.static_cells;
    limit = block.static_bytes;
    byte = static_cast<std::size_t>(at - block.static_shared);
    if (byte >= limit) return quick_global(me, at, bytes, write);
  }
  if ((byte | bytes) % Cells::kWord != 0 || byte + bytes > limit) return false;
  const auto call = reinterpret_cast<std::uintptr_t>(me.call) - block.code_base;
  const QuickCheck quick_check{me.seen->seen, block.base_epoch, me.epoch,
                               static_cast<std::uint32_t>(call),
                               static_cast<std::uint16_t>(me.agent)};
  for (std::size_t i = 0; i < bytes; i += Cells::kWord) {
    Cells::Word& word = cells->word(byte + i);
    if (word.split != 0) return false;
    const bool correct =
        write ? quick_check.write(word.cell, dynamic) : quick_check.read(word.cell);
    if (!correct) return false;
  }
  if (write) ++block.cluster->steps;
  return true;
}

}  // namespace cukit::emulator
