// Barriers of a block, of a warp and of a cluster, and warp collectives.
#include <algorithm>

#include "block.h"

namespace cukit::emulator {

void advance(Fiber& fiber) {
  ClusterRunner& cluster = *fiber.block->cluster;
  if (++fiber.epoch > cluster.newest_epoch) cluster.newest_epoch = fiber.epoch;
}

void release_to(Fiber& fiber, Clock** into) {
  ClockPool& clocks = fiber.block->cluster->clocks;
  if (*into == nullptr) {
    *into = clocks.copy(fiber.seen);
  } else {
    clocks.merge(*into, fiber.seen);
  }
  (*into)->seen[fiber.agent] = fiber.epoch;
  advance(fiber);
}

void acquire_from(Fiber& fiber, const Clock* from) {
  if (from == nullptr) return;
  ClockPool& clocks = fiber.block->cluster->clocks;
  Clock* merged = clocks.copy(fiber.seen);
  clocks.merge(merged, from);
  clocks.release(fiber.seen);
  fiber.seen = merged;
}

namespace {

// Orders each fiber of a group after all others: afterwards they share one clock.
template <typename ForEach>
void join(ClusterRunner& cluster, const ForEach& for_each, Clock* joined) {
  const Clock* last = nullptr;
  for_each([&](Fiber& fiber) {
    if (joined == nullptr) joined = cluster.clocks.copy(fiber.seen);
    // Most fibers share the clock of an earlier barrier; that clock is merged once.
    if (fiber.seen != last) cluster.clocks.merge(joined, fiber.seen);
    last = fiber.seen;
    joined->seen[fiber.agent] = fiber.epoch;
  });
  for_each([&](Fiber& fiber) {
    cluster.clocks.release(fiber.seen);
    fiber.seen = ClockPool::hold(joined);
    advance(fiber);
  });
  cluster.clocks.release(joined);
}

template <typename Visit>
void for_lanes(Block& block, const Warp& warp, unsigned lanes, const Visit& visit) {
  for (; lanes != 0; lanes &= lanes - 1) {
    visit(block.lane(warp, static_cast<unsigned>(__builtin_ctz(lanes))));
  }
}

[[noreturn]] void mismatch(const Fiber& me, const std::string& how, const Barrier& barrier) {
  fault("mismatched barrier: " + how + "\n  " + name_of(me) + " " + where(me.call) +
        "\n  other threads arrived " + where(barrier.first_call));
}

// Whether every thread that the barrier waits for has arrived.
bool complete(const Block& block, const Barrier& barrier) {
  const bool less_exited = barrier.whole && barrier.waiters == barrier.arrived;
  return barrier.arrived >= (less_exited ? block.live : barrier.expected);
}

// Releases all threads that wait at a complete barrier, and resets the barrier. `last`: a thread at
// the barrier that is running; null if there is none.
void open(Block& block, Barrier& barrier, const Fiber* last) {
  if (checked()) {
    join(*block.cluster, [&](const auto& visit) {
      for (Warp& each : block.warps) {
        for_lanes(block, each, barrier.waiting[each.first / kLanes], visit);
      }
    }, barrier.joined);
  }
  const int count = barrier.votes_true;
  const int result = barrier.vote == BlockVote::And  ? count == static_cast<int>(barrier.arrived)
                     : barrier.vote == BlockVote::Or ? count > 0
                                                     : count;
  for (Warp& warp : block.warps) {
    const unsigned lanes = barrier.waiting[warp.first / kLanes];
    for_lanes(block, warp, lanes, [=](Fiber& fiber) { fiber.vote = result; });
    make_ready(block, warp, last != nullptr && last->warp == &warp ? lanes & ~(1u << last->lane) : lanes);
  }
  barrier = Barrier{};
}

// Arrives, and returns once all others have arrived.
void arrive_and_wait(Fiber& me, Barrier& barrier, const char* what, unsigned number = 0,
                     unsigned threads = 0) {
  Block& block = *me.block;
  ++barrier.arrived;
  ++barrier.waiters;
  barrier.waiting[me.index / kLanes] |= 1u << me.lane;
  if (complete(block, barrier)) {
    open(block, barrier, &me);
    shuffle_order();
  } else {
    wait_for(what, number, threads);
  }
}

// The first thread to arrive sets the number of arrivals that the others must specify too.
void expect(const Fiber& me, Barrier& barrier, unsigned expected, bool whole) {
  if (barrier.expected == 0) {
    barrier.expected = expected;
    barrier.whole = whole;
    barrier.first_call = me.call;
  } else if (barrier.expected != expected) {
    mismatch(me, format("%u threads are expected here, and %u by the threads that arrived first",
                        expected, barrier.expected), barrier);
  }
}

}  // namespace

void open_block_barriers(Block& block) {
  for (Barrier& barrier : block.barriers) {
    if (barrier.arrived > 0 && complete(block, barrier)) open(block, barrier, nullptr);
  }
}

std::string stuck_barriers(const ClusterRunner& cluster) {
  std::string text;
  for (unsigned b = 0; b < cluster.num_blocks; ++b) {
    const Block& block = *cluster.blocks[b];
    for (unsigned number = 0; number < kNamedBarriers; ++number) {
      const Barrier& barrier = block.barriers[number];
      if (barrier.arrived == 0) continue;
      const std::string name = barrier.whole && number == 0 ? std::string("__syncthreads")
                                                            : format("named barrier %u", number);
      text += format("\n  %s is missing %u of %u arrivals", name.c_str(),
                     barrier.expected - barrier.arrived, barrier.expected);
      std::vector<unsigned> absent;
      for (const Fiber* fiber : block.fibers) {
        const bool waits = barrier.waiting[fiber->index / kLanes] >> fiber->lane & 1;
        if (!waits && fiber->state != State::Exited) absent.push_back(fiber->index);
      }
      if (barrier.whole) text += ": threads " + list_of(absent) + " have not arrived";
    }
    for (const auto& [address, barrier] : block.mbarriers) {
      if (barrier.waiters.empty()) continue;
      text += format("\n  the mbarrier at shared address %u is missing %u of %u arrivals and %lld "
                     "bytes of copies in its phase %u", address, barrier.pending, barrier.expected,
                     static_cast<long long>(barrier.transactions), barrier.phase);
      std::vector<unsigned> here;
      for (const unsigned agent : barrier.arrivals) here.push_back(agent % cluster.threads);
      std::sort(here.begin(), here.end());
      if (!here.empty()) text += "; threads " + list_of(here) + " have arrived";
    }
  }
  return text;
}

int sync_block(BlockVote vote, int predicate, int line) {
  CUKIT_ENTER(me);
  Block& block = *me.block;
  Barrier& barrier = block.barriers[0];
  const unsigned warp = me.index / kLanes;
  if (barrier.waiting[warp] == 0) {
    barrier.line[warp] = line;
  } else if (barrier.line[warp] != line) {
    mismatch(me, format("threads of one warp wait at different __syncthreads (lines %d and %d)",
                        barrier.line[warp], line), barrier);
  }
  if (barrier.expected == 0) {
    barrier.vote = vote;
  } else if (barrier.vote != vote) {
    mismatch(me, "threads of the block call different forms of __syncthreads", barrier);
  }
  barrier.votes_true += predicate != 0;
  expect(me, barrier, static_cast<unsigned>(block.fibers.size()), true);
  arrive_and_wait(me, barrier, "__syncthreads");
  return me.vote;
}

namespace {

Barrier& named(const Fiber& me, unsigned number, unsigned threads) {
  const unsigned all = static_cast<unsigned>(me.block->fibers.size());
  const unsigned expected = threads == 0 ? all : threads;
  if (number >= kNamedBarriers || expected % kLanes != 0 || expected > all) {
    fault(format("mismatched barrier: barrier %u with %u threads; the number must be 0 to 15, the "
                 "threads a multiple of 32 up to %u\n  ", number, expected, all) +
          name_of(me) + " " + where(me.call));
  }
  Barrier& barrier = me.block->barriers[number];
  expect(me, barrier, expected, threads == 0);
  return barrier;
}

}  // namespace

void sync_named(unsigned number, unsigned threads) {
  CUKIT_ENTER(me);
  Barrier& barrier = named(me, number, threads);
  arrive_and_wait(me, barrier, "named barrier %u of %u threads", number, barrier.expected);
}

void arrive_named(unsigned number, unsigned threads) {
  CUKIT_ENTER(me);
  Barrier& barrier = named(me, number, threads);
  if (checked()) release_to(me, &barrier.joined);
  ++barrier.arrived;
  if (complete(*me.block, barrier)) open(*me.block, barrier, nullptr);
}

void open_cluster_barrier(ClusterRunner& cluster) {
  cluster.arrived = 0;
  ++cluster.generation;
  cluster.clocks.release(cluster.cluster_last);
  cluster.cluster_last = cluster.cluster_joined;
  cluster.cluster_joined = nullptr;
  for (unsigned rank = 0; rank < cluster.num_blocks; ++rank) {
    for (Fiber* fiber : cluster.blocks[rank]->fibers) {
      if (fiber->state == State::Waiting && fiber->waits_for == kClusterWait) make_ready(*fiber);
    }
  }
}

void cluster_arrive() {
  CUKIT_ENTER(me);
  ClusterRunner& cluster = *me.block->cluster;
  if (me.cluster_arrived) {
    fault("mismatched barrier: a thread arrives at the cluster barrier twice without waiting in "
          "between\n  " + name_of(me) + " " + where(me.call));
  }
  me.cluster_arrived = true;
  if (checked()) release_to(me, &cluster.cluster_joined);
  me.cluster_generation = cluster.generation;
  if (++cluster.arrived == cluster.live) open_cluster_barrier(cluster);
}

void cluster_wait() {
  CUKIT_ENTER(me);
  ClusterRunner& cluster = *me.block->cluster;
  if (!me.cluster_arrived) {
    fault("mismatched barrier: a thread waits at the cluster barrier without having arrived\n  " +
          name_of(me) + " " + where(me.call));
  }
  me.cluster_arrived = false;
  if (cluster.generation == me.cluster_generation) wait_for(kClusterWait);
  if (checked()) acquire_from(me, cluster.cluster_last);
}

// Warps ------------------------------------------------------------------------------------------

namespace {

constexpr unsigned kSyncWarp = 100;

void complete_sync(Block& block, Warp& warp, unsigned, unsigned lanes) {
  if (block.cluster->launch->checked == 0) return;
  join(*block.cluster, [&](const auto& visit) { for_lanes(block, warp, lanes, visit); }, nullptr);
}

// The lane whose value `lane` receives in a shuffle.
unsigned source_lane(WarpOp op, unsigned lane, unsigned argument, unsigned width) {
  const unsigned base = lane & ~(width - 1);
  switch (op) {
    case WarpOp::Shuffle: return base + (argument & (width - 1));
    case WarpOp::ShuffleUp: return lane >= base + argument ? lane - argument : lane;
    case WarpOp::ShuffleDown: return argument < base + width - lane ? lane + argument : lane;
    default: {
      const unsigned other = lane ^ argument;
      return other < base + width ? other : lane;
    }
  }
}

void complete_shuffle(Block& block, Warp& warp, unsigned kind, unsigned lanes) {
  std::uint64_t results[kLanes] = {};
  for_lanes(block, warp, lanes, [&](Fiber& fiber) {
    const unsigned from =
        source_lane(static_cast<WarpOp>(kind), fiber.lane, fiber.argument, fiber.width);
    if (from >= kLanes || (lanes >> from & 1) == 0) {
      fault(format("a shuffle reads lane %u, which does not take part: name it in the mask, and "
                   "let it reach the shuffle\n  ", from) +
            name_of(fiber) + " " + where(fiber.call));
    }
    results[fiber.lane] = block.lane(warp, from).value;
  });
  for_lanes(block, warp, lanes, [&](Fiber& fiber) { fiber.value = results[fiber.lane]; });
}

std::uint32_t combine(WarpOp op, std::uint32_t a, std::uint32_t b) {
  switch (op) {
    case WarpOp::AddU32: return a + b;
    case WarpOp::MinU32: return a < b ? a : b;
    case WarpOp::MaxU32: return a > b ? a : b;
    case WarpOp::MinS32: return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? a : b;
    case WarpOp::MaxS32: return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? a : b;
    case WarpOp::And: return a & b;
    case WarpOp::Or: return a | b;
    default: return a ^ b;
  }
}

void complete_vote(Block& block, Warp& warp, unsigned kind, unsigned lanes) {
  const auto op = static_cast<WarpOp>(kind);
  const auto first = static_cast<unsigned>(__builtin_ctz(lanes));
  const std::uint64_t first_value = block.lane(warp, first).value;
  unsigned ballot = 0;
  unsigned equal = 0;
  std::uint32_t reduced = static_cast<std::uint32_t>(first_value);
  std::uint64_t results[kLanes] = {};
  for_lanes(block, warp, lanes, [&](Fiber& fiber) {
    const unsigned bit = 1u << fiber.lane;
    if (fiber.value != 0) ballot |= bit;
    if (fiber.value == first_value) equal |= bit;
    if (fiber.lane != first) reduced = combine(op, reduced, static_cast<std::uint32_t>(fiber.value));
    if (op == WarpOp::MatchAny) {
      for_lanes(block, warp, lanes, [&](Fiber& other) {
        if (other.value == fiber.value) results[fiber.lane] |= 1u << other.lane;
      });
    }
  });
  for_lanes(block, warp, lanes, [&](Fiber& fiber) {
    switch (op) {
      case WarpOp::Any: fiber.value = ballot != 0; break;
      case WarpOp::All: fiber.value = ballot == lanes; break;
      case WarpOp::Ballot: fiber.value = ballot; break;
      case WarpOp::MatchAny: fiber.value = results[fiber.lane]; break;
      case WarpOp::MatchAll: fiber.value = equal == lanes ? lanes : 0; break;
      default: fiber.value = reduced; break;
    }
  });
}

constexpr const char* kNames[] = {
    "__shfl_sync, mask 0x%08x",      "__shfl_up_sync, mask 0x%08x",
    "__shfl_down_sync, mask 0x%08x", "__shfl_xor_sync, mask 0x%08x",
    "__any_sync, mask 0x%08x",       "__all_sync, mask 0x%08x",
    "__ballot_sync, mask 0x%08x",    "__match_any_sync, mask 0x%08x",
    "__match_all_sync, mask 0x%08x", "__reduce_add_sync, mask 0x%08x",
    "__reduce_min_sync, mask 0x%08x", "__reduce_max_sync, mask 0x%08x",
    "__reduce_min_sync, mask 0x%08x", "__reduce_max_sync, mask 0x%08x",
    "__reduce_and_sync, mask 0x%08x", "__reduce_or_sync, mask 0x%08x",
    "__reduce_xor_sync, mask 0x%08x"};

}  // namespace

void sync_warp(unsigned mask) {
  CUKIT_ENTER(me);
  static_cast<void>(me);
  meet(kSyncWarp, mask, "__syncwarp, mask 0x%08x", complete_sync);
}

std::uint64_t warp_collective(WarpOp op, unsigned mask, std::uint64_t value, unsigned argument,
                              unsigned width) {
  CUKIT_ENTER(me);
  me.value = value;
  me.argument = argument;
  me.width = width;
  const auto kind = static_cast<unsigned>(op);
  meet(kind, mask, kNames[kind], op <= WarpOp::ShuffleXor ? complete_shuffle : complete_vote);
  return me.value;
}

}  // namespace cukit::emulator
