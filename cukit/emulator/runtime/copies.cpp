// cp.async, and bulk copies that complete on mbarriers or in groups.
#include <algorithm>
#include <array>
#include <cstring>

#include "block.h"
#include "engines.h"

namespace cukit::emulator {

namespace {

[[noreturn]] void misaligned(const Fiber& me, const char* what, std::uint64_t address,
                             unsigned alignment) {
  fault(format("misaligned: %s must be a multiple of %u bytes, and is %llu bytes more than one\n  ",
               what, alignment, static_cast<unsigned long long>(address % alignment)) +
        name_of(me) + " " + where(me.call));
}

bool late(const Fiber& me) { return me.block->cluster->launch->late != 0; }

// The late mode's copies need fixed addresses. A cluster's static shared memory changes place when
// another of its blocks runs; dynamic shared memory does not.
void require_steady(const Fiber& me, const Block& block, const unsigned char* pointer) {
  const ClusterRunner& cluster = *me.block->cluster;
  const auto at = static_cast<std::size_t>(pointer - block.dynamic_shared);
  if (cluster.num_blocks > 1 && at >= cluster.launch->dynamic_bytes) {
    fault("not emulated: a bulk copy of static shared memory in a cluster with late=True; use "
          "dynamic shared memory\n  " + name_of(me) + " " + where(me.call));
  }
}

}  // namespace

// cp.async ----------------------------------------------------------------------------------------

void cp_async(std::uint32_t shared, const void* global, unsigned bytes, unsigned present) {
  CUKIT_ENTER(me);
  if (shared % bytes != 0) misaligned(me, "the shared address of cp.async", shared, bytes);
  if (present > 0 && reinterpret_cast<std::uintptr_t>(global) % bytes != 0) {
    misaligned(me, "the global address of cp.async", reinterpret_cast<std::uintptr_t>(global),
               bytes);
  }
  const Place place = place_of(me, shared, bytes);
  if (checked()) {
    if (present > 0) check(thread_actor(me), global, present, Access::Read);
    check_shared(thread_actor(me), *place.block, place.pointer, bytes, Access::Write);
    set_pending(*place.block, place.pointer, bytes);
  }
  Work work = [to = place.pointer, global, bytes, present] {
    std::memcpy(to, global, present);
    std::memset(to + present, 0, bytes - present);
  };
  if (!late(me)) {
    work();
    if (!checked()) return;
    work = nullptr;
  }
  me.copies.copies.push_back({me.copies.open, place.pointer, bytes, std::move(work)});
}

void cp_async_commit() {
  CUKIT_ENTER(me);
  ++me.copies.open;
}

void cp_async_wait(unsigned pending) {
  CUKIT_ENTER(me);
  std::vector<Copy>& copies = me.copies.copies;
  std::size_t done = 0;
  while (done < copies.size() && copies[done].group + pending < me.copies.open) {
    Copy& copy = copies[done++];
    if (copy.work) copy.work();
    if (checked()) set_written(*me.block, copy.to, copy.bytes, thread_actor(me));
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}

// mbarriers ---------------------------------------------------------------------------------------

namespace {

constexpr std::size_t kMbarrierBytes = 8;

// mbarrier.init is an ordinary write. Threads of the same block may use the mbarrier after a
// barrier. TMA, which completes on it, and threads of other blocks also need a fence between the
// initialisation and that barrier, by the initialising thread: fence.mbarrier_init, or, for TMA, a
// proxy fence.
void check_initialisation(const Fiber& me, const Mbarrier& barrier, std::uint32_t address,
                          bool by_engine) {
  const Fiber& initialiser = *barrier.initialiser;
  const std::uint32_t epoch = barrier.initialised;
  if (epoch <= initialiser.mbarrier_fence_epoch) return;
  if (by_engine) {
    if (epoch <= initialiser.fence_epoch) return;
    if (me.fenced != nullptr && epoch <= me.fenced->seen[initialiser.agent]) return;
  } else if (initialiser.block == me.block) {
    return;
  }
  fault(format("missing fence_mbarrier_init: %s uses the mbarrier at shared address %u",
               by_engine ? "TMA" : "another block of the cluster", local_address(address)) +
        "\n  " + name_of(me) + " " + where(me.call) +
        "\n  call fence_mbarrier_init() before the barrier that follows its initialisation by\n  " +
        name_of(initialiser) + " " + where(barrier.initialised_call));
}

Mbarrier& mbarrier_at(Fiber& me, std::uint32_t address, const char* use, bool by_engine = false) {
  const Place place = place_of(me, address, kMbarrierBytes);
  const auto found = place.block->mbarriers.find(local_address(address));
  if (found == place.block->mbarriers.end()) {
    fault(format("%s an mbarrier that was not initialised, at shared address %u: call "
                 "mbarrier_init first, and put a barrier in between\n  ", use,
                 local_address(address)) +
          name_of(me) + " " + where(me.call));
  }
  if (checked()) {
    check_shared(thread_actor(me), *place.block, place.pointer, kMbarrierBytes, Access::Atomic);
    check_initialisation(me, found->second, address, by_engine);
  }
  return found->second;
}

// Completes the phase if every thread has arrived and every byte has been copied.
void complete_phase(ClusterRunner& cluster, Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.transactions != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.arrivals.clear();
  ++cluster.steps;
  cluster.clocks.release(barrier.completed);
  barrier.completed = barrier.joined;
  barrier.joined = nullptr;
  for (Fiber* waiter : barrier.waiters) make_ready(*waiter);
  barrier.waiters.clear();
}

// Threads that wait for the phase are ordered after the copies and wgmmas that this thread has
// waited for, but not after its own accesses.
void release_engines_to(const Fiber& me, Clock** into) {
  ClusterRunner& cluster = *me.block->cluster;
  if (*into == nullptr) *into = cluster.clocks.filled(cluster.base_epoch);
  for (unsigned agent = cluster.first_engine(); agent < cluster.first_engine() + kEngines; ++agent) {
    (*into)->seen[agent] = std::max((*into)->seen[agent], me.seen->seen[agent]);
  }
}

void arrive_once(Fiber& me, Mbarrier& barrier, bool relaxed) {
  if (barrier.pending == 0) {
    fault(format("mbarrier: more arrivals in a phase than the %u of its mbarrier_init; raise that "
                 "count, or let fewer threads arrive\n  ", barrier.expected) +
          name_of(me) + " " + where(me.call));
  }
  if (checked()) {
    if (relaxed) {
      release_engines_to(me, &barrier.joined);
    } else {
      release_to(me, &barrier.joined);
    }
  }
  --barrier.pending;
  barrier.arrivals.push_back(me.agent);
  complete_phase(*me.block->cluster, barrier);
}

}  // namespace

void mbarrier_init(std::uint32_t address, unsigned arrivals) {
  CUKIT_ENTER(me);
  if (address % kMbarrierBytes != 0) {
    misaligned(me, "the shared address of an mbarrier", address, kMbarrierBytes);
  }
  const Place place = place_of(me, address, kMbarrierBytes);
  if (checked()) {
    check_shared(thread_actor(me), *place.block, place.pointer, kMbarrierBytes, Access::Write);
  }
  Mbarrier barrier;
  barrier.expected = barrier.pending = arrivals;
  barrier.engine = address / kMbarrierBytes % kMbarrierEngines;
  barrier.initialiser = &me;
  barrier.initialised = me.epoch;
  barrier.initialised_call = me.call;
  place.block->mbarriers[local_address(address)] = barrier;
}

void fence_mbarrier_init() {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "fence.mbarrier_init");
  if (!checked()) return;
  me.mbarrier_fence_epoch = me.epoch;
  advance(me);
}

void mbarrier_arrive(std::uint32_t address, unsigned bytes) {
  CUKIT_ENTER(me);
  Mbarrier& barrier = mbarrier_at(me, address, "arrival at");
  barrier.transactions += bytes;
  arrive_once(me, barrier, false);
}

void mbarrier_arrive_relaxed(std::uint32_t address) {
  CUKIT_ENTER(me);
  arrive_once(me, mbarrier_at(me, address, "arrival at"), true);
}

void mbarrier_wait(std::uint32_t address, unsigned parity) {
  CUKIT_ENTER(me);
  Mbarrier& barrier = mbarrier_at(me, address, "wait for");
  while ((barrier.phase & 1) == parity) {
    barrier.waiters.push_back(&me);
    wait_for("the mbarrier at shared address %u, phase of parity %u", local_address(address),
             parity);
  }
  if (!checked()) return;
  acquire_from(me, barrier.completed);
  std::size_t kept = 0;
  for (PendingCopy& copy : barrier.pending_copies) {
    if (copy.phase < barrier.phase) {
      set_written(*copy.block, copy.pointer, copy.bytes, copy.actor);
    } else {
      barrier.pending_copies[kept++] = copy;
    }
  }
  barrier.pending_copies.resize(kept);
}

void start_inbound_copy(Fiber& me, Block& target, std::uint32_t barrier_address, unsigned char* to,
                        unsigned bytes, unsigned swizzle, Work work) {
  Mbarrier& barrier = mbarrier_at(
      me, target.rank == me.block->rank ? local_address(barrier_address)
                                        : map_to_rank(local_address(barrier_address), target.rank),
      "completion of a copy on", true);
  ClusterRunner& cluster = *me.block->cluster;
  if (checked()) {
    const Actor actor = engine_actor(me, barrier.engine);
    check_shared(actor, target, to, bytes, Access::Write, swizzle);
    set_pending(target, to, bytes);
    barrier.pending_copies.push_back({&target, to, bytes, barrier.phase, actor});
    // Threads that wait for the phase are ordered after the copy.
    if (barrier.joined == nullptr) barrier.joined = cluster.clocks.filled(cluster.base_epoch);
    barrier.joined->seen[actor.agent] = actor.epoch;
  }
  Work finish = [&cluster, &barrier, bytes, work = std::move(work)] {
    work();
    barrier.transactions -= bytes;
    complete_phase(cluster, barrier);
  };
  if (late(me)) {
    require_steady(me, target, to);
    barrier.late.push_back(std::move(finish));
  } else {
    finish();
  }
}

// Bulk copies -------------------------------------------------------------------------------------

void bulk_load(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "cp.async.bulk");
  const auto source = reinterpret_cast<std::uintptr_t>(global);
  if (shared % 16 != 0) misaligned(me, "the shared address of cp.async.bulk", shared, 16);
  if (source % 16 != 0) misaligned(me, "the global address of cp.async.bulk", source, 16);
  if (bytes % 16 != 0) misaligned(me, "the size of cp.async.bulk", bytes, 16);
  if (checked()) check(thread_actor(me), global, bytes, Access::Read);
  unsigned char* const to = place_in(me, *me.block, shared, bytes);
  start_inbound_copy(me, *me.block, barrier, to, bytes, 0, [=] { std::memcpy(to, global, bytes); });
}

namespace {

void add_atomically(float* to, float value) {
  auto* const bits = reinterpret_cast<std::uint32_t*>(to);
  std::uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    float sum;
    std::memcpy(&sum, &seen, sizeof(sum));
    sum += value;
    std::uint32_t next;
    std::memcpy(&next, &sum, sizeof(next));
    if (__atomic_compare_exchange_n(bits, &seen, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      return;
    }
  }
}

// Checks a bulk copy to global memory and returns its source in shared memory.
Place bulk_source(Fiber& me, void* global, std::uint32_t shared, unsigned bytes, Access access) {
  const auto target = reinterpret_cast<std::uintptr_t>(global);
  if (shared % 16 != 0) misaligned(me, "the shared address of cp.async.bulk", shared, 16);
  if (target % 16 != 0) misaligned(me, "the global address of cp.async.bulk", target, 16);
  if (bytes % 16 != 0) misaligned(me, "the size of cp.async.bulk", bytes, 16);
  if (checked()) check(thread_actor(me), global, bytes, access);
  return place_of(me, shared, bytes);
}

}  // namespace

void bulk_store(void* global, std::uint32_t shared, unsigned bytes) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "cp.async.bulk");
  const Place place = bulk_source(me, global, shared, bytes, Access::Write);
  start_outbound_copy(me, place, bytes, [from = place.pointer, global, bytes] {
    std::memcpy(global, from, bytes);
  });
}

void bulk_add(float* global, std::uint32_t shared, unsigned bytes) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "cp.reduce.async.bulk");
  const Place place = bulk_source(me, global, shared, bytes, Access::Atomic);
  start_outbound_copy(me, place, bytes, [from = place.pointer, global, bytes] {
    for (unsigned i = 0; i < bytes / sizeof(float); ++i) {
      float value;
      std::memcpy(&value, from + i * sizeof(float), sizeof(float));
      add_atomically(global + i, value);
    }
  });
}

void start_outbound_copy(Fiber& me, const Place& place, unsigned bytes, Work work) {
  const unsigned engine = kMbarrierEngines + me.index % kStoreEngines;
  std::uint32_t epoch = 0;
  if (checked()) {
    const Actor actor = engine_actor(me, engine);
    check_shared(actor, *place.block, place.pointer, bytes, Access::Read);
    epoch = actor.epoch;
  }
  if (late(me)) {
    require_steady(me, *place.block, place.pointer);
  } else {
    work();
    work = nullptr;
  }
  me.bulk.items.push_back({me.bulk.open, engine, epoch, std::move(work)});
}

void bulk_commit() {
  CUKIT_ENTER(me);
  ++me.bulk.open;
}

void bulk_wait(unsigned pending) {
  CUKIT_ENTER(me);
  std::vector<BulkGroups::Item>& items = me.bulk.items;
  std::size_t done = 0;
  while (done < items.size() && items[done].group + pending < me.bulk.open) {
    BulkGroups::Item& item = items[done++];
    if (item.work) item.work();
    if (checked()) order_after_engine(me, item.engine, item.epoch);
  }
  items.erase(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(done));
}

void order_after_engine(Fiber& me, unsigned engine, std::uint32_t epoch) {
  ClusterRunner& cluster = *me.block->cluster;
  const unsigned agent = cluster.first_engine() + engine;
  if (me.seen->seen[agent] >= epoch) return;
  Clock* clock = cluster.clocks.copy(me.seen);
  clock->seen[agent] = epoch;
  cluster.clocks.release(me.seen);
  me.seen = clock;
}

void fence_proxy_async() {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "fence.proxy.async");
  if (!checked()) return;
  me.fence_epoch = me.epoch;
  me.block->cluster->clocks.release(me.fenced);
  me.fenced = ClockPool::hold(me.seen);
  advance(me);
}

// Remote shared memory ----------------------------------------------------------------------------

void store_remote(std::uint32_t address, std::uint32_t value) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "st.shared::cluster");
  if (address % 4 != 0) misaligned(me, "the address of st.shared::cluster", address, 4);
  const Place place = place_of(me, address, 4);
  if (checked()) check_shared(thread_actor(me), *place.block, place.pointer, 4, Access::Write);
  std::memcpy(place.pointer, &value, 4);
}

std::uint32_t fetch_add_remote(std::uint32_t address, std::uint32_t value) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "atom.shared::cluster");
  if (address % 4 != 0) misaligned(me, "the address of atom.shared::cluster", address, 4);
  const Place place = place_of(me, address, 4);
  if (checked()) check_shared(thread_actor(me), *place.block, place.pointer, 4, Access::Atomic);
  // One OS thread runs all blocks of a cluster.
  std::uint32_t old;
  std::memcpy(&old, place.pointer, 4);
  const std::uint32_t sum = old + value;
  std::memcpy(place.pointer, &sum, 4);
  return old;
}

void store_async(std::uint32_t address, const void* value, std::uint32_t barrier) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "st.async");
  constexpr unsigned kBytes = 16;
  if (address % kBytes != 0) misaligned(me, "the address of st.async", address, kBytes);
  const Place place = place_of(me, address, kBytes);
  std::array<unsigned char, kBytes> bytes;
  std::memcpy(bytes.data(), value, kBytes);
  start_inbound_copy(me, *place.block, barrier, place.pointer, kBytes, 0,
                     [to = place.pointer, bytes] { std::memcpy(to, bytes.data(), kBytes); });
}

}  // namespace cukit::emulator
