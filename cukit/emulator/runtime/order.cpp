#include "order.h"

#include <array>

#include "common/emulator/memory.h"
#include "run.h"

namespace cukit::emulator {

namespace {

// Whether the thread is ordered after the accesses of its cluster's agents up to these epochs.
bool covers(const Fiber& me, const std::vector<std::uint32_t>& part) {
  for (std::size_t i = 0; i < part.size(); ++i) {
    if (part[i] > me.seen->seen[i] && i != me.agent) return false;
  }
  return true;
}

// Orders the thread after what was published at an address.
void acquire_from_published(Fiber& me, const Published& there) {
  ClusterRunner& cluster = *me.block->cluster;
  const auto mine = static_cast<std::uint32_t>(cluster.number);
  const auto* const own = epochs_of(there.everywhere, mine);
  const auto* const own_in_block = epochs_of(there.in_block, mine);
  ForeignEpochs foreign = merged(me.seen->foreign, there.everywhere);
  if (foreign == me.seen->foreign && (own == nullptr || covers(me, *own)) &&
      (own_in_block == nullptr || covers(me, *own_in_block))) {
    return;
  }
  Clock* clock = cluster.clocks.copy(me.seen);
  clock->foreign = std::move(foreign);
  for (const auto* part : {own, own_in_block}) {
    for (std::size_t i = 0; part != nullptr && i < part->size(); ++i) {
      clock->seen[i] = std::max(clock->seen[i], (*part)[i]);
    }
  }
  cluster.clocks.release(me.seen);
  me.seen = clock;
}

void add_to_published(const Fiber& me, Published& there) {
  there.everywhere = merged(there.everywhere, me.seen->published);
  there.in_block = merged(there.in_block, me.seen->published_in_block);
}

// Calls visit(Published&) for an address, under a lock. Shared memory needs none: one OS thread
// runs the whole cluster.
template <typename Visit>
void visit_published(Fiber& me, const void* address, const Visit& visit) {
  const auto key = reinterpret_cast<std::uintptr_t>(address);
  if (cells_of(*me.block, address, 1).cells != nullptr) {
    visit(me.block->published[key]);
    return;
  }
  PublishedStripe& stripe = me.block->cluster->run->published[key / 8 % kPublishedStripes];
  const std::lock_guard<std::mutex> lock(stripe.mutex);
  visit(stripe.places[key]);
}

// Whether no thread of the launch has executed a fence yet.
bool nothing_published(const Fiber& me) {
  return !me.block->cluster->run->any_published.load(std::memory_order_acquire);
}

}  // namespace

void fence(FenceScope scope) {
  CUKIT_ENTER(me);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (!checked()) return;
  ClusterRunner& cluster = *me.block->cluster;
  Clock* clock = cluster.clocks.copy(me.seen);
  clock->seen[me.agent] = me.epoch;
  const ForeignEpochs own =
      foreign_epochs_of(static_cast<std::uint32_t>(cluster.number), clock->seen,
                        cluster.first_engine() + kEngines);
  clock->published_in_block = own;
  if (scope == FenceScope::Device) clock->published = merged(clock->foreign, own);
  cluster.clocks.release(me.seen);
  me.seen = clock;
  advance(me);
  cluster.run->any_published.store(true, std::memory_order_release);
}

void publish(Fiber& me, const void* to) {
  if (!publishes(me)) return;
  visit_published(me, to, [&](Published& there) { add_to_published(me, there); });
}

void acquire_published(Fiber& me, const void* from) {
  if (nothing_published(me)) return;
  visit_published(me, from, [&](const Published& there) { acquire_from_published(me, there); });
}

void count_poll(Fiber& me, const void* address) {
  constexpr unsigned kSame = 32;  // consecutive reads of one address look like a spin loop
  constexpr unsigned kAny = 1024;
  const bool same = me.polled == address;
  me.polled = address;
  if (++me.atomics % (same ? kSame : kAny) == 0) yield();
}

// Atomics --------------------------------------------------------------------------------------------

namespace {

template <typename T>
std::uint64_t exchange_if(void* to, std::uint64_t expected, std::uint64_t value) {
  T old = static_cast<T>(expected);
  __atomic_compare_exchange_n(static_cast<T*>(to), &old, static_cast<T>(value), false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}

std::uint64_t compare_exchange(void* to, std::uint64_t expected, std::uint64_t value,
                               std::size_t bytes) {
  switch (bytes) {
    case 2: return exchange_if<std::uint16_t>(to, expected, value);
    case 4: return exchange_if<std::uint32_t>(to, expected, value);
    default: return exchange_if<std::uint64_t>(to, expected, value);
  }
}

std::uint64_t load(const void* from, std::size_t bytes) {
  switch (bytes) {
    case 2: return __atomic_load_n(static_cast<const std::uint16_t*>(from), __ATOMIC_SEQ_CST);
    case 4: return __atomic_load_n(static_cast<const std::uint32_t*>(from), __ATOMIC_SEQ_CST);
    default: return __atomic_load_n(static_cast<const std::uint64_t*>(from), __ATOMIC_SEQ_CST);
  }
}

}  // namespace

std::uint64_t atomic_compare_exchange(void* to, std::uint64_t expected, std::uint64_t value,
                                      std::size_t bytes) {
  CUKIT_ENTER(me);
  count_poll(me, to);
  std::uint64_t old = 0;
  if (checked() && !nothing_published(me)) {
    visit_published(me, to, [&](Published& there) {
      old = compare_exchange(to, expected, value, bytes);
      acquire_from_published(me, there);
      if (old == expected) add_to_published(me, there);
    });
  } else {
    old = compare_exchange(to, expected, value, bytes);
    if (checked()) acquire_published(me, to);  // the first fence may be newer than the check above
  }
  if (old == expected && value != expected) ++me.block->cluster->steps;
  return old;
}

std::uint64_t atomic_load(const void* from, std::size_t bytes) {
  CUKIT_ENTER(me);
  const std::uint64_t value = load(from, bytes);
  if (checked()) acquire_published(me, from);
  return value;
}

}  // namespace cukit::emulator
