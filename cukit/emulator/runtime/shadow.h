// What the checked mode records for every byte of a block's shared memory: its last write and the
// reads since.
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
struct ClusterRunner;
struct Fiber;
struct Launch;

// The kind of a recorded read or atomic. Strong reads are volatile and atomic loads.
enum class Mark : std::uint8_t { Plain, Atomic, Strong, BlockAtomic };

inline bool is_atomic(Access access) { return access == Access::Atomic || access == Access::BlockAtomic; }
inline bool is_atomic(Mark mark) { return mark == Mark::Atomic || mark == Mark::BlockAtomic; }

inline Mark mark_of(Access access) {
  return access == Access::Atomic ? Mark::Atomic
         : access == Access::StrongRead ? Mark::Strong
         : access == Access::BlockAtomic ? Mark::BlockAtomic
                                        : Mark::Plain;
}
// Whether an access and an earlier, unordered one are a race. A plain write conflicts with every
// access.
inline bool conflict(Access access, Mark earlier) {
  return access == Access::Write || (access == Access::Read && is_atomic(earlier)) ||
         (is_atomic(access) && earlier == Mark::Plain);
}

// Which of a cell's two recorded reads a new read replaces. The choice ensures that a later write
// that is not ordered after all reads is compared with at least one read by another thread, of each
// kind if possible.
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
  std::uint16_t swizzle = 0;  // of the last write: width in 16-byte chunks, 1 for none, 0 if unknown
  Mark mark[2] = {};          // of the reads
  std::uint8_t pending = 0;   // an asynchronous copy to it is in flight
  std::uint8_t generic = 0;   // the last write was by the generic proxy, not the async proxy
};
static_assert(std::has_unique_object_representations_v<Cell>, "cells are compared as bytes");

// Addresses below this are a null pointer plus an index.
constexpr std::uintptr_t kNullBytes = 65536;

// The cells of a part of shared memory. The bytes of a word mostly have the same history; then one
// cell stands for all four.
class Cells {
 public:
  static constexpr unsigned kWord = 4;

  struct Word {
    Cell cell;
    std::uint32_t split;  // 0, or the number of its entry in bytes_ plus one
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

  // Calls visit(cell, byte) for the cells of exactly `count` bytes from `first` on: once for a
  // whole word whose bytes share a cell, and once for each byte elsewhere.
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
  // Back to one cell, if the bytes have the same history again.
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

// Memory that was accessed recently, for which quick() skips the lookup.
struct Known {
  const unsigned char* low = nullptr;
  std::size_t bytes = 0;
};

struct Shadow {
  Cells static_cells, dynamic_cells;
  // Whole arrays of global memory that were read and written most recently.
  static constexpr unsigned kKnown = 4;
  Known readable[kKnown], writeable[kKnown];
  unsigned next_readable = 0, next_writeable = 0;

  void forget_global() {
    for (Known& known : readable) known = Known{};
    for (Known& known : writeable) known = Known{};
  }
};

// The agent of an access: a thread, or an engine on behalf of the thread that issued the operation.
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

// Ends the launch if the access is out of bounds, reads data that has not been written or is still
// being copied, or is a race.
void check(const Actor& actor, const void* pointer, std::size_t bytes, Access access);
// The same for an access known to be in the shared memory of `block`. `swizzle`: the width, in
// 16-byte chunks, of the swizzle that a tensor map or matrix descriptor names; 1 for none, 0 if
// unknown.
void check_shared(const Actor& actor, Block& block, const void* pointer, std::size_t bytes,
                  Access access, unsigned swizzle = 0);
// set_pending marks bytes that an asynchronous copy will write; set_written, called once a thread
// has waited for the copy, marks them as written.
void set_pending(Block& block, const void* pointer, std::size_t bytes);
void set_written(Block& block, const void* pointer, std::size_t bytes, const Actor& by);

// A code address as cells store it.
std::uint32_t offset_of(const ClusterRunner& cluster, const void* call);
// The report of a race with an earlier access: a write, or a read of this kind.
std::string report_race(const Actor& actor, std::size_t bytes, Access access, const std::string& place,
                        Mark mark, bool write, const std::string& by, std::uint32_t call,
                        const char* remedy);
// Remedies for races: between threads of a block, of a cluster, and of the grid.
constexpr const char* kBlockRemedy =
    "put a barrier between the two: __syncthreads(), or __syncwarp() within a warp "
    "(an update by several threads needs an atomic)";
constexpr const char* kClusterRemedy = "put a cluster barrier between the two";
constexpr const char* kGridRemedy =
    "order the blocks by __threadfence() and an atomic, or launch a second kernel";
// If the access is a store of up to 16 bytes, defers the report until after the store, and drops
// the report if the store has not changed the value. False for other accesses.
bool defer_judgement(const Actor& actor, const void* pointer, std::size_t bytes, Access access,
             const std::string& report);
// Whether the bytes are in one allocation made by malloc or new in kernels.
bool in_heap(std::uintptr_t address, std::size_t bytes);
// Describes an address outside all memory of the launch: relative to the nearest array.
std::string describe_outside(const Launch& launch, std::uintptr_t address);
// "byte 8 of argument 1", or a variable of the kernel's file.
std::string describe_global(const Launch& launch, std::uintptr_t address);

// The cells of `bytes` bytes of the shared memory of `block`.
struct CellPlace {
  Cells* cells;  // null if they are not all shared memory of the block
  std::size_t byte;
};
CellPlace cells_of(Block& block, const void* pointer, std::size_t bytes);
// True for shared memory that no thread of the block has written.
bool uninitialised(Block& block, const void* pointer);
// "byte 8 of the static shared memory of 32 bytes", for messages.
std::string describe_shared(Block& block, const void* pointer);

}  // namespace cukit::emulator
