// What the checked mode knows of every byte of a block's shared memory: who wrote it last, and who
// read it since.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "common/emulator/thread.h"

namespace cukit::emulator {

struct Block;
struct Fiber;
struct Launch;

// How a byte was read, besides or together with being changed. Strong reads are volatile and atomic loads.
enum class Mark : std::uint8_t { Plain, Atomic, Strong, BlockAtomic };

inline bool is_atomic(Access access) { return access == Access::Atomic || access == Access::BlockAtomic; }
inline bool is_atomic(Mark mark) { return mark == Mark::Atomic || mark == Mark::BlockAtomic; }

inline Mark mark_of(Access access) {
  return access == Access::Atomic ? Mark::Atomic
         : access == Access::StrongRead ? Mark::Strong
         : access == Access::BlockAtomic ? Mark::BlockAtomic
                                        : Mark::Plain;
}
// Whether an access and an earlier one that nothing orders are a race. A plain write is one with anything.
inline bool conflict(Access access, Mark earlier) {
  return access == Access::Write || (access == Access::Read && is_atomic(earlier)) ||
         (is_atomic(access) && earlier == Mark::Plain);
}

// Which of the two reads that a cell remembers makes room for another one: so that a writer whom nothing
// orders after all readers meets at least one that is not itself, and of each kind, if possible.
template <typename MarkOf, typename IsMine, typename IsOrdered>
int slot_for(Mark mark, const MarkOf& mark_of_slot, const IsMine& mine, const IsOrdered& ordered) {
  for (int slot = 0; slot < 2; ++slot) {
    if (mark_of_slot(slot) == mark && (mine(slot) || ordered(slot))) return slot;
  }
  for (int slot = 0; slot < 2; ++slot) {
    if (!mine(slot) && ordered(slot)) return slot;
  }
  return 1;
}

struct Cell {
  std::uint32_t write_epoch = 0;
  std::uint32_t read_epoch[2] = {};
  std::uint32_t write_call = 0;  // offset in the kernel's code
  std::uint32_t read_call[2] = {};
  std::uint16_t writer = 0;
  std::uint16_t reader[2] = {};
  std::uint16_t swizzle = 0;  // 16-byte chunks of the pattern it was written in; 0 if nobody said
  Mark mark[2] = {};          // of the reads
  std::uint8_t pending = 0;   // a background copy is on its way here
  std::uint8_t generic = 0;   // the last write was an ordinary one, not the async proxy's
};
static_assert(std::has_unique_object_representations_v<Cell>, "cells are compared as bytes");

// Addresses below it come of a null pointer and an index.
constexpr std::uintptr_t kNullBytes = 65536;

// The cells of a part of shared memory. The bytes of a word mostly have one past: then one cell stands for
// all of them.
class Cells {
 public:
  static constexpr unsigned kWord = 4;

  struct Word {
    Cell cell;
    std::uint32_t split;  // 0, or the number of the cells of its bytes
  };

  void cover(std::size_t bytes) {
    if (words_.size() * kWord < bytes) words_.resize((bytes + kWord - 1) / kWord);
  }

  // The word that starts at this byte.
  Word& word(std::size_t byte) { return words_[byte / kWord]; }

  Cell& of(std::size_t byte) {
    Word& word = words_[byte / kWord];
    return word.split == 0 ? word.cell : bytes_[word.split - 1][byte % kWord];
  }

  // Calls visit(cell, byte) for cells that together are those of `count` bytes from `first` on, and of no
  // others: for every whole word of one past, and for every single byte elsewhere.
  template <typename Visit>
  void visit(std::size_t first, std::size_t count, const Visit& visit) {
    const std::size_t end = first + count;
    for (std::size_t at = first; at < end;) {
      Word& word = words_[at / kWord];
      const std::size_t next = std::min(end, (at / kWord + 1) * kWord);
      if (word.split == 0 && next - at == kWord) {
        visit(word.cell, at);
        at = next;
        continue;
      }
      if (word.split == 0) split(word);
      std::array<Cell, kWord>& cells = bytes_[word.split - 1];
      for (; at < next; ++at) visit(cells[at % kWord], at);
      join(word);
    }
  }

 private:
  void split(Word& word) {
    if (free_.empty()) {
      bytes_.emplace_back();
      free_.push_back(static_cast<std::uint32_t>(bytes_.size()));
    }
    word.split = free_.back();
    free_.pop_back();
    bytes_[word.split - 1].fill(word.cell);
  }
  // If its bytes have one past again.
  void join(Word& word) {
    const std::array<Cell, kWord>& cells = bytes_[word.split - 1];
    if (std::memcmp(&cells[0], &cells[1], (kWord - 1) * sizeof(Cell)) != 0) return;
    word.cell = cells[0];
    free_.push_back(word.split);
    word.split = 0;
  }

  std::vector<Word> words_;
  std::vector<std::array<Cell, kWord>> bytes_;
  std::vector<std::uint32_t> free_;
};

// Memory that threads mostly access: what check() need not look for each time.
struct Known {
  const unsigned char* low = nullptr;
  std::size_t bytes = 0;
};

struct Shadow {
  Cells static_cells, dynamic_cells;
  // Global memory that was read and written last, whole arrays: all of it may be.
  static constexpr unsigned kKnown = 4;
  Known readable[kKnown], writeable[kKnown];
  unsigned next_readable = 0, next_writeable = 0;

  void forget_global() {
    for (Known& known : readable) known = Known{};
    for (Known& known : writeable) known = Known{};
  }
};

struct Cluster;
struct Launch;

// Who does it: a thread, or an engine on behalf of the thread that issued it.
struct Actor {
  const Fiber* issuer;
  unsigned agent;
  std::uint32_t epoch;
  const void* call;
  bool engine;
};

Actor thread_actor(const Fiber& fiber);
// A new epoch of engine `number`.
Actor engine_actor(const Fiber& issuer, unsigned number);

// Ends the launch on an access outside the allocations, to data not yet there, or in a race.
void check(const Actor& actor, const void* pointer, std::size_t bytes, Access access);
// The same for an access known to lie in the shared memory of `block`. `swizzle`: the chunks of the
// pattern that a tensor map or a matrix descriptor names, 1 for none; 0 where nobody says.
void check_shared(const Actor& actor, Block& block, const void* pointer, std::size_t bytes,
                  Access access, unsigned swizzle = 0);
// Bytes that a background copy will write, and has written, as seen by the thread that waited.
void set_pending(Block& block, const void* pointer, std::size_t bytes);
void set_landed(Block& block, const void* pointer, std::size_t bytes, const Actor& by);

// Code addresses as cells keep them.
std::uint32_t offset_of(const Cluster& cluster, const void* call);
// The text of a race with an earlier access: a write, or a read of this kind.
std::string report_race(const Actor& actor, std::size_t bytes, Access access, const std::string& place,
                        Mark mark, bool write, const std::string& by, std::uint32_t call);
// True if the race is to be judged once the value has been written: a store of up to 16 bytes.
bool suspect(const Actor& actor, const void* pointer, std::size_t bytes, Access access,
             const std::string& report);
// Whether bytes are of one allocation of the kernels' own.
bool in_heap(std::uintptr_t address, std::size_t bytes);
// Where an address lies that is nobody's: relative to the nearest array of the launch.
std::string describe_outside(const Launch& launch, std::uintptr_t address);
// "byte 8 of argument 1", or a variable of the kernel's file.
std::string describe_global(const Launch& launch, std::uintptr_t address);

// Where `bytes` bytes of the shared memory of `block` have their cells.
struct CellPlace {
  Cells* cells;  // null if they are not all shared memory of the block
  std::size_t byte;
};
CellPlace cells_of(Block& block, const void* pointer, std::size_t bytes);
// True of shared memory that nobody in the block has written.
bool uninitialised(Block& block, const void* pointer);
// "static shared memory, byte 8 of 32" and the like, for messages.
std::string describe_shared(Block& block, const void* pointer);

}  // namespace cukit::emulator
