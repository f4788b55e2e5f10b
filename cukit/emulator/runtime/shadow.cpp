// Checks every access of a checked kernel: bounds, initialisation, order.
#include "shadow.h"

#include <algorithm>
#include <cstring>

#include "block.h"
#include "engines.h"
#include "guesses.h"
#include "order.h"
#include "run.h"

namespace cukit::emulator {

namespace {

const char* verb(Access access) {
  return access == Access::Write ? "write" : is_atomic(access) ? "atomic" : "read";
}

std::string where_offset(const Block& block, std::uint32_t offset) {
  return where(reinterpret_cast<const void*>(block.cluster->module->base + offset));
}

std::string name_of_agent(const ClusterRunner& cluster, unsigned agent) {
  if (agent >= cluster.first_engine()) return name_of_engine(agent - cluster.first_engine());
  const Block& block = *cluster.blocks[agent / cluster.threads];
  return name_of(*block.fibers[agent % cluster.threads]);
}

std::string head(const Actor& actor, const char* what, std::size_t bytes, Access access) {
  return format("%s: %s of %zu bytes", what, verb(access), bytes) +
         (actor.engine ? " by an asynchronous operation" : "");
}

std::string tail(const Actor& actor) {
  return "\n  " + name_of(*actor.issuer) + " " + where(actor.call);
}

struct SharedCheck {
  const Actor& actor;
  Block& block;
  const unsigned char* pointer;
  std::size_t bytes;
  Access access;
  const std::uint32_t* seen;
  const std::uint32_t base_epoch;
  const unsigned swizzle;
  const CellPlace place;

  // Whether the race is reported only if the store changes the value (same_value_writes).
  bool judged_later(const std::string& report) const {
    return block.cluster->launch->same_value_writes != 0 &&
           defer_judgement(actor, pointer, bytes, access, report);
  }

  bool ordered(unsigned agent, std::uint32_t epoch) const {
    // Accesses of earlier clusters have completed, and their agents were other threads.
    return epoch <= base_epoch || agent == actor.issuer->agent || epoch <= seen[agent] ||
           (actor.engine && agent == actor.agent);
  }

  // Reports a race with the cell's last write, or defers the report.
  __attribute__((cold, noinline)) void after_write(const Cell& cell, std::size_t i) const {
    const std::string report = race(i, Mark::Plain, true, cell.writer, cell.write_call);
    if (!judged_later(report)) fault(report);
  }

  // Reports a race with an earlier read or atomic, or postpones the report (guesses.h).
  __attribute__((cold, noinline)) void after_read(const Cell& cell, int slot, std::size_t i) const {
    const auto report = [&] {
      return race(i, cell.mark[slot], false, cell.reader[slot], cell.read_call[slot]);
    };
    if (!may_guess(actor, bytes, access, cell.mark[slot])) fault(report());
    const bool reads = access == Access::Read;
    const std::uint32_t load = reads ? offset_of(*block.cluster, actor.call) : cell.read_call[slot];
    if (reads) note_guess(pointer, load);
    block.cluster->run->guesses.postpone(load, report);
  }

  __attribute__((cold, noinline)) std::string race(std::size_t i, Mark mark, bool write,
                                                   unsigned agent, std::uint32_t call) const {
    return report_race(actor, bytes, access, describe_shared(block, pointer + i), mark, write,
                       name_of_agent(*block.cluster, agent), call, remedy(agent));
  }

  // How to order the access after an earlier one by this agent.
  const char* remedy(unsigned agent) const {
    const ClusterRunner& cluster = *block.cluster;
    const bool by_engine = agent >= cluster.first_engine();
    if (by_engine) return "wait for the asynchronous operation before this access";
    if (actor.engine) return "put a barrier or an mbarrier between the two";
    if (agent / cluster.threads != actor.agent / cluster.threads) return kClusterRemedy;
    return kBlockRemedy;
  }

  [[noreturn]] __attribute__((cold, noinline)) void fault_at(std::size_t i, const char* what,
                                                          const char* remedy) const {
    fault(head(actor, what, bytes, access) + " at " + describe_shared(block, pointer + i) +
          tail(actor) + remedy);
  }

  bool is_static() const { return place.cells == &block.shadow.static_cells; }

  // Reports an access to unwritten bytes in the gap between two variables.
  void check_variable(std::size_t i) const {
    const Launch& launch = *block.cluster->launch;
    const auto first = static_cast<std::uint32_t>(place.byte + i);
    const auto* const end = launch.shared + launch.num_shared;
    const auto* next = std::upper_bound(
        launch.shared, end, first,
        [](std::uint32_t at, const std::uint32_t(&variable)[2]) { return at < variable[0]; });
    if (next == launch.shared) return;
    const std::uint32_t(&variable)[2] = *(next - 1);
    if (first + (bytes - i) <= variable[0] + variable[1]) return;
    fault(head(actor, "out of bounds", bytes, access) + " at " + describe_shared(block, pointer) +
          tail(actor));
  }

  void check_cell(Cell& cell, std::size_t i) const {
    const bool written = cell.write_epoch > base_epoch;
    if (cell.pending && written) {
      fault(head(actor, "asynchronous copy not waited for", bytes, access) + " at " +
            describe_shared(block, pointer + i) + tail(actor) +
            "\n  wait for the copy before this access; it was started by\n  " +
            name_of_agent(*block.cluster, cell.writer) + " " + where_offset(block, cell.write_call));
    }
    if (!written && is_static()) check_variable(i);
    if (!written && access != Access::Write && !in_unwritten_tail(i) && !guards_object(i)) {
      fault_at(i, "uninitialised shared memory",
            "\n  no thread has written it yet: a store is missing, or a barrier after the store");
    }
    if (!ordered(cell.writer, cell.write_epoch)) after_write(cell, i);
    for (int slot = 0; slot < 2; ++slot) {
      if (conflict(access, cell.mark[slot]) && !ordered(cell.reader[slot], cell.read_epoch[slot])) {
        after_read(cell, slot, i);
      }
    }
    if (actor.engine) check_proxy(cell, written, i);
    if (access != Access::Write) {
      if (swizzle != 0 && cell.swizzle != 0 && swizzle != cell.swizzle) wrong_swizzle(cell, i);
      note_read(cell);
      return;
    }
    cell.writer = static_cast<std::uint16_t>(actor.agent);
    cell.write_epoch = actor.epoch;
    cell.write_call = offset_of(*block.cluster, actor.call);
    cell.pending = 0;
    cell.generic = !actor.engine;
    cell.swizzle = static_cast<std::uint16_t>(swizzle);
    // The write supersedes recorded atomics.
    for (int slot = 0; slot < 2; ++slot) {
      if (cell.mark[slot] == Mark::Atomic) cell.read_epoch[slot] = 0;
    }
  }

  bool guards_object(std::size_t i) const {
    return is_guard(*block.cluster->module,
                    static_cast<std::size_t>(pointer + i - block.static_shared));
  }

  // A vector load whose first element was written may end in unwritten bytes: the kernel need not
  // use them.
  bool in_unwritten_tail(std::size_t i) const {
    constexpr std::size_t kElement = 4;
    return access == Access::Read && !actor.engine && bytes > kElement && i >= kElement;
  }

  // The async proxy (TMA, wgmma) needs a proxy fence between a generic write and its own access to
  // the same bytes, be it a read or a write; otherwise its access may overtake the generic write.
  // The fence is executed by the writer after its write, or by the issuer once it is ordered after
  // the write. No fence is needed between generic reads and a copy that overwrites those bytes, if
  // happens-before orders them (readers arrive at an mbarrier, on which the producer waits before
  // it starts the copy): a read that has returned its value cannot be overtaken. Nor is one needed
  // after an access of the async proxy.
  void check_proxy(const Cell& cell, bool written, std::size_t i) const {
    if (written && cell.generic) require_fence(cell.writer, cell.write_epoch, cell.write_call, i);
    for (int slot = 0; slot < 2; ++slot) {
      if (cell.mark[slot] != Mark::Atomic || cell.read_epoch[slot] <= base_epoch) continue;
      require_fence(cell.reader[slot], cell.read_epoch[slot], cell.read_call[slot], i);
    }
  }

  void require_fence(unsigned agent, std::uint32_t epoch, std::uint32_t call, std::size_t i) const {
    const ClusterRunner& cluster = *block.cluster;
    if (agent >= cluster.first_engine()) return;
    const Fiber& writer = *cluster.blocks[agent / cluster.threads]->fibers[agent % cluster.threads];
    const Fiber& issuer = *actor.issuer;
    if (epoch <= writer.fence_epoch) return;
    if (issuer.fenced != nullptr && epoch <= issuer.fenced->seen[agent]) return;
    fault(head(actor, "missing fence.proxy.async", bytes, access) + " at " +
          describe_shared(block, pointer + i) + tail(actor) +
          "\n  call fence_proxy_async() after the ordinary write, before the barrier that follows "
          "it; the write is by\n  " +
          name_of(writer) + " " + where_offset(block, call));
  }

  [[noreturn]] void wrong_swizzle(const Cell& cell, std::size_t i) const {
    const auto name = [](unsigned chunks) {
      return chunks == 1 ? std::string("without a swizzle")
                         : format("with a swizzle of %u bytes", 16 * chunks);
    };
    fault(head(actor, "wrong swizzle", bytes, access) + " at " + describe_shared(block, pointer + i) +
          tail(actor) + "\n  reads " + name(swizzle) + " what was written " + name(cell.swizzle) +
          " " + where_offset(block, cell.write_call) + ": both must use the same swizzle");
  }

  void note_read(Cell& cell) const {
    const Mark mark = mark_of(access);
    const int slot = slot_for(
        mark, [&](int each) { return cell.mark[each]; },
        [&](int each) {
          return cell.reader[each] == actor.agent && cell.read_epoch[each] > base_epoch;
        },
        [&](int each) { return ordered(cell.reader[each], cell.read_epoch[each]); });
    cell.reader[slot] = static_cast<std::uint16_t>(actor.agent);
    cell.read_epoch[slot] = actor.epoch;
    cell.read_call[slot] = offset_of(*block.cluster, actor.call);
    cell.mark[slot] = mark;
  }
};

// Whether the bytes are in the launch's copy of an argument, which the kernel's entry function
// reads.
bool is_argument(const Launch& launch, std::uintptr_t address, std::size_t bytes) {
  for (unsigned i = 0; i < launch.entry->num_parameters; ++i) {
    const auto low = reinterpret_cast<std::uintptr_t>(launch.arguments[i]);
    if (address >= low && address + bytes <= low + launch.entry->parameter_bytes[i]) return true;
  }
  return false;
}

// Lets quick() accept the next accesses to this memory. Always returns true.
bool remember(Shadow& shadow, Access access, std::uintptr_t low, std::uintptr_t high) {
  const Known known{reinterpret_cast<const unsigned char*>(low), high - low};
  if (access == Access::Read) shadow.readable[shadow.next_readable++ % Shadow::kKnown] = known;
  if (access == Access::Write) shadow.writeable[shadow.next_writeable++ % Shadow::kKnown] = known;
  return true;
}

// Whether the launch may access the bytes: an array, the kernel's own variables, an argument, the
// heap.
bool is_global(const Actor& actor, std::uintptr_t address, std::size_t bytes, Access access) {
  Shadow& shadow = actor.issuer->block->shadow;
  const ClusterRunner& cluster = *actor.issuer->block->cluster;
  const Launch& launch = *cluster.launch;
  const Range* const end = launch.ranges + launch.num_ranges;
  const Range* range = std::upper_bound(
      launch.ranges, end, address, [](std::uintptr_t at, const Range& each) { return at < each.low; });
  const Range* read_only = nullptr;
  // Arrays may overlap: any array that starts before the access may contain it.
  while (range != launch.ranges) {
    --range;
    if (address + bytes > range->high) continue;
    if (access == Access::Read || access == Access::StrongRead || range->writeable) {
      return remember(shadow, access, range->low, range->high);
    }
    read_only = range;
  }
  if (read_only != nullptr) {
    fault(head(actor, "write to a read-only array", bytes, access) +
          format(" (argument %u)", read_only->argument) + tail(actor));
  }
  // __constant__ and __device__ variables, the arguments, and the heap of malloc.
  const Module& module = *cluster.module;
  if (address >= module.data_low && address + bytes <= module.data_high) {
    return remember(shadow, access, module.data_low, module.data_high);
  }
  if (access == Access::Read && address >= module.base && address + bytes <= module.end) {
    return remember(shadow, access, module.base, module.end);
  }
  if (access == Access::Read && is_argument(launch, address, bytes)) return true;
  return in_heap(address, bytes);
}

// Whether an address outside all memory of the launch was probably meant to be in shared memory.
bool near_shared(const Block& block, const unsigned char* at) {
  constexpr std::size_t kNear = 256;
  const std::size_t static_bytes = block.cluster->module->static_bytes;
  const std::size_t dynamic_bytes = block.cluster->launch->dynamic_bytes;
  const auto distance = [at](const unsigned char* low) { return static_cast<std::size_t>(at - low); };
  return (dynamic_bytes > 0 && distance(block.dynamic_shared) < dynamic_bytes + kNear) ||
         (static_bytes > 0 && distance(block.static_shared) < static_bytes + kNear);
}

}  // namespace

std::string describe_outside(const Launch& launch, std::uintptr_t address) {
  constexpr std::uintptr_t kNear = std::uintptr_t{1} << 30;
  std::string place = format("address 0x%zx, far from every array of this launch", address);
  std::uintptr_t nearest = kNear;
  for (const Range* range = launch.ranges; range != launch.ranges + launch.num_ranges; ++range) {
    const bool before = address < range->low;
    const bool after = address >= range->high;
    const std::uintptr_t distance = before ? range->low - address : after ? address - range->high : 0;
    if (distance >= nearest) continue;
    nearest = distance;
    const std::string name = format("argument %u{argument %u}", range->argument, range->argument);
    place = (before  ? format("%zu bytes before ", distance)
             : after ? format("%zu bytes past the end of ", distance)
                     : std::string("across the end of ")) + name;
  }
  return place;
}

std::uint32_t offset_of(const ClusterRunner& cluster, const void* call) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(call) - cluster.module->base);
}

std::string report_race(const Actor& actor, std::size_t bytes, Access access, const std::string& place,
                        Mark mark, bool write, const std::string& by, std::uint32_t call,
                        const char* remedy) {
  const char* earlier = write ? "write" : is_atomic(mark) ? "atomic" : "read";
  return head(actor, "race", bytes, access) + " at " + place + tail(actor) +
         "\n  nothing orders it after the " + earlier + " by\n  " + by + " " +
         where_offset(*actor.issuer->block, call) + "\n  fix: " + remedy;
}

bool defer_judgement(const Actor& actor, const void* pointer, std::size_t bytes, Access access,
             const std::string& report) {
  Fiber& me = current();
  RacingStore& it = me.deferred.store;
  if (actor.engine || access != Access::Write || bytes > sizeof it.before) return false;
  it.pointer = static_cast<const unsigned char*>(pointer);
  it.bytes = static_cast<unsigned>(bytes);
  std::memcpy(it.before, pointer, bytes);
  me.deferred.report = report;
  me.has_deferred = true;
  return true;
}

void run_deferred_now(Fiber& me) {
  me.has_deferred = false;
  if (me.deferred.acquire_address != nullptr) {
    acquire_published(me, me.deferred.acquire_address);
    me.deferred.acquire_address = nullptr;
  }
  RacingStore& it = me.deferred.store;
  if (it.bytes == 0) return;
  const bool same = std::memcmp(it.pointer, it.before, it.bytes) == 0;
  it.bytes = 0;
  if (!same) fault(me.deferred.report);
}

std::string describe_global(const Launch& launch, std::uintptr_t address) {
  for (const Range* range = launch.ranges; range != launch.ranges + launch.num_ranges; ++range) {
    if (address < range->low || address >= range->high) continue;
    const auto byte = static_cast<std::size_t>(address - range->low);
    return format("byte %zu of argument %u{argument %u %zu}", byte, range->argument, range->argument,
                  byte);
  }
  for (const MappedArray& array : arrays_of_maps(launch)) {
    if (address < array.low || address >= array.high) continue;
    return format("byte %zu of the array of the tensor map in argument %u",
                  static_cast<std::size_t>(address - array.low), array.argument);
  }
  return format("a __device__ variable{device %zu}",
                static_cast<std::size_t>(address - current().block->cluster->module->base));
}

Actor thread_actor(const Fiber& fiber) {
  return {&fiber, fiber.agent, fiber.epoch, fiber.call, false};
}

Actor engine_actor(const Fiber& issuer, unsigned number) {
  ClusterRunner& cluster = *issuer.block->cluster;
  const std::uint32_t epoch = ++cluster.engine_epoch[number];
  cluster.newest_epoch = std::max(cluster.newest_epoch, epoch);
  return {&issuer, cluster.first_engine() + number, epoch, issuer.call, true};
}

CellPlace cells_of(Block& block, const void* pointer, std::size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  const std::size_t dynamic_bytes = block.cluster->launch->dynamic_bytes;
  const auto dynamic_at = static_cast<std::size_t>(at - block.dynamic_shared);
  if (dynamic_at < dynamic_bytes) {
    if (dynamic_at + bytes > dynamic_bytes) return {nullptr, 0};
    return {&block.shadow.dynamic_cells, dynamic_at};
  }
  const std::size_t static_bytes = block.cluster->module->static_bytes;
  const auto static_at = static_cast<std::size_t>(at - block.static_shared);
  if (static_at < static_bytes && static_at + bytes <= static_bytes) {
    return {&block.shadow.static_cells, static_at};
  }
  const auto copy_at = static_cast<std::size_t>(at - block.static_copy.data());
  if (copy_at < block.static_copy.size() && copy_at + bytes <= static_bytes) {
    return {&block.shadow.static_cells, copy_at};
  }
  return {nullptr, 0};
}

bool uninitialised(Block& block, const void* pointer) {
  const CellPlace place = cells_of(block, pointer, 1);
  return place.cells != nullptr &&
         place.cells->of(place.byte).write_epoch <= block.cluster->base_epoch;
}

std::string describe_shared(Block& block, const void* pointer) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  const std::size_t dynamic_bytes = block.cluster->launch->dynamic_bytes;
  const std::size_t static_bytes = block.cluster->module->static_bytes;
  const auto byte = static_cast<std::size_t>(at - block.static_shared);
  // An access past the end is described by where it starts. The two parts may be adjacent in host
  // memory.
  if (byte >= static_bytes && at >= block.dynamic_shared && at <= block.dynamic_shared + dynamic_bytes + 4096) {
    return format("byte %zu of the dynamic shared memory of %zu bytes",
                  static_cast<std::size_t>(at - block.dynamic_shared), dynamic_bytes);
  }
  return format("byte %zu of the static shared memory of %zu bytes", byte, static_bytes) +
         (byte < static_bytes ? format("{static %zu}", byte) : "");
}

void check_shared(const Actor& actor, Block& block, const void* pointer, std::size_t bytes,
                  Access access, unsigned swizzle) {
  const CellPlace place = cells_of(block, pointer, bytes);
  if (place.cells == nullptr) {
    fault(head(actor, "out of bounds", bytes, access) + " at " + describe_shared(block, pointer) +
          tail(actor));
  }
  if (access == Access::Write) ++block.cluster->steps;
  const SharedCheck shared{actor, block, static_cast<const unsigned char*>(pointer), bytes, access,
                    actor.issuer->seen->seen, block.cluster->base_epoch, swizzle, place};
  // Equal cells are updated equally, and neighbouring cells are mostly equal: copy the last result.
  Cell before, after;
  bool any = false;
  place.cells->visit(place.byte, bytes, [&](Cell& cell, std::size_t at) {
    if (any && std::memcmp(&cell, &before, sizeof(Cell)) == 0) {
      cell = after;
      return;
    }
    before = cell;
    shared.check_cell(cell, at - place.byte);
    after = cell;
    any = true;
  });
}

void check(const Actor& actor, const void* pointer, std::size_t bytes, Access access) {
  const Fiber& me = *actor.issuer;
  if (pointer == &cukit_emulator_thread) return;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  // The thread's own stack, which also holds its Fiber.
  if (address - reinterpret_cast<std::uintptr_t>(me.stack_low) < Stack::kBytes) return;
  Block& block = *me.block;
  if (cells_of(block, pointer, 1).cells != nullptr) {
    check_shared(actor, block, pointer, bytes, access == Access::BlockAtomic ? Access::Atomic : access);
    return;
  }
  if (is_global(actor, address, bytes, access)) {
    if (access == Access::Write) ++block.cluster->steps;
    if (block.cluster->launch->global_races) {
      block.cluster->run->global.check(actor, pointer, bytes, access);
    }
    return;
  }
  const bool shared = near_shared(block, static_cast<const unsigned char*>(pointer));
  if (address < kNullBytes) {
    fault(head(actor, "null pointer", bytes, access) + format(" at address 0x%zx", address) +
          tail(actor));
  }
  fault(head(actor, "out of bounds", bytes, access) + " at " +
        (shared ? describe_shared(block, pointer)
                : "global memory " + describe_outside(*block.cluster->launch, address)) +
        tail(actor));
}

void check_alignment(const void* pointer, std::size_t alignment, const char* what) {
  CUKIT_ENTER(me);
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0) return;
  fault(format("misaligned: %s needs %zu-byte alignment, the address has %zu-byte alignment", what,
               alignment,
               static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(pointer) &
                                        -reinterpret_cast<std::uintptr_t>(pointer))) +
        tail(thread_actor(me)));
}

void set_pending(Block& block, const void* pointer, std::size_t bytes) {
  const CellPlace place = cells_of(block, pointer, bytes);
  place.cells->visit(place.byte, bytes, [](Cell& cell, std::size_t) { cell.pending = 1; });
}

void set_written(Block& block, const void* pointer, std::size_t bytes, const Actor& by) {
  const CellPlace place = cells_of(block, pointer, bytes);
  place.cells->visit(place.byte, bytes, [&](Cell& cell, std::size_t) {
    cell.pending = 0;
    cell.writer = static_cast<std::uint16_t>(by.agent);
    cell.write_epoch = by.epoch;
  });
}

}  // namespace cukit::emulator
