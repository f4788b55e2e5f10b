// Runs the fibers of a cluster: switches between them, completes the instructions that threads of a
// warp or warpgroup execute together, and reports a deadlock if no fiber is ready.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "block.h"
#include "engines.h"
#include "run.h"

__thread cukit::emulator::Thread* cukit_emulator_thread;

namespace cukit::emulator {

namespace {

// Makes `fiber` the current thread, and its block the resident one: its static shared memory moves
// into place.
void install(Fiber& fiber) {
  ClusterRunner& cluster = *fiber.block->cluster;
  cukit_emulator_thread = &fiber;
  if (cluster.num_blocks > 1 && cluster.resident != fiber.block) {
    const std::size_t bytes = cluster.module->static_bytes;
    unsigned char* const here = fiber.block->static_shared;
    if (cluster.resident != nullptr) std::memcpy(cluster.resident->static_copy.data(), here, bytes);
    std::memcpy(here, fiber.block->static_copy.data(), bytes);
    cluster.resident = fiber.block;
  }
}

unsigned nth_set_bit(unsigned bits, unsigned n) {
  while (n-- > 0) bits &= bits - 1;
  return static_cast<unsigned>(__builtin_ctz(bits));
}

// The first set bit after `position`, cyclically.
unsigned next_set_bit(unsigned bits, unsigned position) {
  const unsigned later = position >= 31 ? 0 : bits & (~0u << (position + 1));
  return static_cast<unsigned>(__builtin_ctz(later != 0 ? later : bits));
}

unsigned choose(ClusterRunner& cluster, unsigned bits, unsigned position) {
  if (cluster.launch->seed == 0) return next_set_bit(bits, position);
  return nth_set_bit(bits, random_number(cluster) % __builtin_popcount(bits));
}

// Removes a fiber from the ready set and returns it: the next one after `from`, or a random one if
// the launch has a seed. If `from` polls, a fiber of another block or warp is preferred, since that
// one may end the poll. Null if no fiber is ready.
Fiber* pick(ClusterRunner& cluster, const Fiber* from, bool polls = false) {
  Block* block = from != nullptr ? from->block : cluster.blocks[0].get();
  const bool seeded = cluster.launch->seed != 0;
  const bool stay = (!seeded || random_number(cluster) % 16 != 0) && !polls;
  if (block->ready_warps == 0 || (!stay && cluster.num_blocks > 1)) {
    const unsigned start =
        seeded ? random_number(cluster) % cluster.num_blocks : block->rank + polls;
    for (unsigned i = 0; i < cluster.num_blocks; ++i) {
      Block* other = cluster.blocks[(start + i) % cluster.num_blocks].get();
      if (other->ready_warps != 0) {
        block = other;
        break;
      }
    }
    if (block->ready_warps == 0) return nullptr;
  }
  unsigned warp_index = 0;
  unsigned lane = kLanes - 1;
  if (from != nullptr && from->block == block) {
    warp_index = from->index / kLanes;
    lane = from->lane;
  }
  if (block->warps[warp_index].ready == 0 || !stay) {
    warp_index = choose(cluster, block->ready_warps, warp_index);
  }
  Warp& warp = block->warps[warp_index];
  lane = choose(cluster, warp.ready, lane);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) block->ready_warps &= ~(1u << warp_index);
  return &block->lane(warp, lane);
}

}  // namespace

void abandon(ClusterRunner& cluster) {
  void* abandoned;
  cukit_emulator_switch(&abandoned, cluster.main_stack);
  __builtin_unreachable();
}

namespace {

void switch_from(Fiber& from, Fiber& to) {
  ClusterRunner& cluster = *from.block->cluster;
  if (cluster.run->stopped()) abandon(cluster);
  to.state = State::Ready;
  if (&from == &to) return;
  install(to);
  cukit_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

}  // namespace

std::string list_of(const std::vector<unsigned>& threads) {
  std::string text;
  for (std::size_t i = 0; i < threads.size();) {
    std::size_t last = i;
    while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += last == i ? format("%u", threads[i]) : format("%u-%u", threads[i], threads[last]);
    i = last + 1;
  }
  return text;
}

namespace {

// Appends the threads of a warp whose bits are set in `lanes`.
void add_lanes(std::vector<unsigned>& threads, unsigned first, unsigned lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    threads.push_back(first + static_cast<unsigned>(__builtin_ctz(lanes)));
  }
}

// One line for each warp-wide or warpgroup-wide instruction that is missing threads.
std::string missing_threads(const Block& block) {
  std::string text;
  const auto add = [&](const char* name, const char* of, unsigned first, unsigned count,
                       const std::vector<unsigned>& missing) {
    text += format("%smissing threads: %s is an instruction of %s, here threads %u-%u of block "
                   "(%u, %u, %u), and threads ", text.empty() ? "" : "\n", name, of, first,
                   first + count - 1, block.index.x, block.index.y, block.index.z) +
            list_of(missing) + " do not reach it";
  };
  for (const Warp& warp : block.warps) {
    for (const WarpRendezvous& rendezvous : warp.rendezvous) {
      if (!rendezvous.whole) continue;
      std::vector<unsigned> missing;
      add_lanes(missing, warp.first, ~rendezvous.arrived);
      add(rendezvous.name, "all 32 lanes of a warp", warp.first, kLanes, missing);
    }
  }
  for (std::size_t group = 0; group < block.warp_groups.size(); ++group) {
    const WarpGroup::WarpgroupRendezvous& rendezvous = block.warp_groups[group].rendezvous;
    if (rendezvous.name == nullptr) continue;
    const auto first = static_cast<unsigned>(group) * WarpGroup::kThreads;
    std::vector<unsigned> missing;
    for (unsigned w = 0; w < WarpGroup::kWarps; ++w) {
      add_lanes(missing, first + w * kLanes, ~rendezvous.arrived[w]);
    }
    add(rendezvous.name, "a whole warpgroup (four warps, the first a multiple of four)", first,
        WarpGroup::kThreads, missing);
  }
  return text;
}

}  // namespace

std::string missing_threads(const ClusterRunner& cluster) {
  std::string text;
  for (unsigned b = 0; b < cluster.num_blocks; ++b) {
    const std::string more = missing_threads(*cluster.blocks[b]);
    if (!more.empty()) text += (text.empty() ? "" : "\n") + more;
  }
  return text;
}

std::string waiting_threads(const ClusterRunner& cluster) {
  std::string text;
  for (unsigned b = 0; b < cluster.num_blocks; ++b) {
    const Block& block = *cluster.blocks[b];
    std::map<std::pair<std::string, const void*>, std::vector<unsigned>> groups;
    std::vector<unsigned> exited;
    for (Fiber* fiber : block.fibers) {
      if (fiber->state == State::Exited) {
        exited.push_back(fiber->index);
      } else if (fiber->state == State::Waiting && (fiber->warp->ready >> fiber->lane & 1) == 0) {
        char what[160];
        std::snprintf(what, sizeof what, fiber->waits_for, fiber->wait_numbers[0],
                      fiber->wait_numbers[1]);
        groups[{what, fiber->call}].push_back(fiber->index);
      }
    }
    if (groups.empty() && exited.empty()) continue;
    text += format("\nblock (%u, %u, %u)", block.index.x, block.index.y, block.index.z);
    for (const auto& [what, threads] : groups) {
      text += "\n  threads " + list_of(threads) + " wait at " + what.first + " " +
              where(what.second);
    }
    if (!exited.empty()) text += "\n  threads " + list_of(exited) + " have exited";
  }
  return text + stuck_barriers(cluster);
}

namespace {

[[noreturn]] void deadlock(ClusterRunner& cluster) {
  std::string text = missing_threads(cluster);
  if (text.empty()) {
    text = "deadlock: every thread waits";
  } else {
    text += "; call it where all of them reach it";
  }
  fault(text + waiting_threads(cluster));
}

Fiber& next_or_deadlock(ClusterRunner& cluster, const Fiber* from) {
  for (;;) {
    if (Fiber* next = pick(cluster, from)) return *next;
    if (!finish_late_work(cluster)) deadlock(cluster);
  }
}

// Completes collectives in which only exited lanes are missing.
void complete_without(Block& block, Warp& warp) {
  for (std::size_t i = 0; i < warp.rendezvous.size(); ++i) {
    const WarpRendezvous rendezvous = warp.rendezvous[i];
    if (rendezvous.whole || (rendezvous.mask & warp.live & ~rendezvous.arrived) != 0) continue;
    warp.rendezvous.erase(warp.rendezvous.begin() + static_cast<std::ptrdiff_t>(i--));
    rendezvous.complete(block, warp, rendezvous.kind, rendezvous.arrived);
    make_ready(block, warp, rendezvous.arrived);
  }
}

[[noreturn]] void exit_fiber(Fiber& me) {
  run_deferred(me);
  ClusterRunner& cluster = *me.block->cluster;
  if (!me.bulk.items.empty()) {
    fault("a thread exits before its bulk copies have read shared memory: call bulk_wait "
          "first\n  " +
          name_of(me) + " " + where(me.call));
  }
  if (!me.block->warp_groups[me.index / WarpGroup::kThreads].products.empty()) {
    exit_before_products(me);
  }
  me.state = State::Exited;
  ++cluster.steps;
  me.warp->live &= ~(1u << me.lane);
  --me.block->live;
  complete_without(*me.block, *me.warp);
  if (me.block->live > 0) open_block_barriers(*me.block);
  if (--cluster.live == 0) abandon(cluster);
  // The exit counts as an arrival, so an earlier arrival by this thread is subtracted.
  if (me.cluster_arrived && me.cluster_generation == cluster.generation) --cluster.arrived;
  if (cluster.arrived > 0 && cluster.arrived == cluster.live) open_cluster_barrier(cluster);
  Fiber& next = next_or_deadlock(cluster, &me);
  switch_from(me, next);
  __builtin_unreachable();
}

void fiber_main() {
  Fiber& me = current();
  const Launch& launch = *me.block->cluster->launch;
  launch.entry->run(launch.arguments);
  exit_fiber(current());
}

}  // namespace

std::uint32_t random_number(ClusterRunner& cluster) {
  // xorshift64*
  cluster.random ^= cluster.random >> 12;
  cluster.random ^= cluster.random << 25;
  cluster.random ^= cluster.random >> 27;
  return static_cast<std::uint32_t>(cluster.random * 0x2545F4914F6CDD1Dull >> 32);
}

void make_ready(Block& block, Warp& warp, unsigned lanes) {
  if (lanes == 0) return;
  warp.ready |= lanes;
  block.ready_warps |= 1u << (warp.first / kLanes);
}

void wait_for(const char* what, unsigned first, unsigned second) {
  Fiber& me = current();
  me.state = State::Waiting;
  me.waits_for = what;
  me.wait_numbers[0] = first;
  me.wait_numbers[1] = second;
  // Without checks, stores are not counted, so waits count as progress.
  if (me.block->cluster->launch->checked == 0) ++me.block->cluster->steps;
  switch_from(me, next_or_deadlock(*me.block->cluster, &me));
}

void shuffle_order() {
  Fiber& me = current();
  if (me.block->cluster->launch->seed == 0) return;
  make_ready(me);
  switch_from(me, *pick(*me.block->cluster, &me));
}

void yield() {
  Fiber& me = current();
  ClusterRunner& cluster = *me.block->cluster;
  cluster.run->check_patience(me);
  // While a thread polls, the cluster always has a ready thread, so next_or_deadlock() never does
  // the work that the late mode has deferred: it is done here, after every kTurns polls.
  constexpr unsigned kTurns = 256;
  if (me.polls % kTurns == 0) finish_late_work(cluster);
  make_ready(me);
  switch_from(me, *pick(cluster, &me, true));
}

void meet(unsigned kind, unsigned mask, const char* name,
          void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes), bool whole) {
  Fiber& me = current();
  Warp& warp = *me.warp;
  const unsigned mine = 1u << me.lane;
  if ((mask & mine) == 0) {
    fault(format("%s with mask 0x%08x, which does not contain the calling lane %u\n  %s ", name,
                 mask, me.lane, name_of(me).c_str()) + where(me.call));
  }
  WarpRendezvous* found = nullptr;
  for (WarpRendezvous& rendezvous : warp.rendezvous) {
    if (rendezvous.kind == kind && rendezvous.mask == mask && (rendezvous.arrived & mine) == 0) {
      found = &rendezvous;
      break;
    }
  }
  if (found == nullptr) {
    warp.rendezvous.push_back({name, complete, kind, mask, 0, whole});
    found = &warp.rendezvous.back();
  }
  found->arrived |= mine;
  if (((whole ? ~0u : mask & warp.live) & ~found->arrived) != 0) {
    wait_for(name, mask);
    return;
  }
  const WarpRendezvous rendezvous = *found;
  warp.rendezvous.erase(warp.rendezvous.begin() + (found - warp.rendezvous.data()));
  rendezvous.complete(*me.block, warp, rendezvous.kind, rendezvous.arrived);
  make_ready(*me.block, warp, rendezvous.arrived & ~mine);
  shuffle_order();
}

void meet_warp_group(const char* name, void (*complete)(Block&, unsigned group)) {
  Fiber& me = current();
  Block& block = *me.block;
  const unsigned number = me.index / WarpGroup::kThreads;
  WarpGroup::WarpgroupRendezvous& rendezvous = block.warp_groups[number].rendezvous;
  if (rendezvous.name == nullptr) {
    rendezvous.name = name;
    rendezvous.call = me.call;
  } else if (rendezvous.name != name) {
    std::vector<unsigned> others;
    for (unsigned w = 0; w < WarpGroup::kWarps; ++w) {
      add_lanes(others, number * WarpGroup::kThreads + w * kLanes, rendezvous.arrived[w]);
    }
    fault(format("divergent warpgroup: a thread reaches %s while others of its warpgroup wait at "
                 "another instruction that all 128 threads must execute together\n  ", name) +
          name_of(me) + " " + where(me.call) + "\n  threads " + list_of(others) + " are at " +
          rendezvous.name + " " + where(rendezvous.call));
  }
  rendezvous.arrived[me.index / kLanes % WarpGroup::kWarps] |= 1u << me.lane;
  if (++rendezvous.count < WarpGroup::kThreads) {
    wait_for(name);
    return;
  }
  rendezvous = {};
  complete(block, number);
  for (unsigned w = 0; w < WarpGroup::kWarps; ++w) {
    Warp& warp = block.warps[number * WarpGroup::kWarps + w];
    make_ready(block, warp, &warp == me.warp ? ~(1u << me.lane) : ~0u);
  }
  shuffle_order();
}

bool finish_late_work(ClusterRunner& cluster) {
  bool any = false;
  for (unsigned b = 0; b < cluster.num_blocks; ++b) {
    for (auto& [address, barrier] : cluster.blocks[b]->mbarriers) {
      if (barrier.waiters.empty() || barrier.late.empty()) continue;
      std::vector<Work> late;
      late.swap(barrier.late);
      for (Work& work : late) work();
      any = true;
    }
  }
  return any;
}

void ClusterRunner::execute(std::uint64_t number) {
  prepare(number);
  Fiber* first = pick(*this, nullptr);
  first->state = State::Ready;
  install(*first);
  cukit_emulator_switch(&main_stack, first->stack_pointer);
  cukit_emulator_thread = nullptr;
}

void ClusterRunner::prepare_block(unsigned rank, uint3 index) {
  if (blocks.size() <= rank) blocks.push_back(std::make_unique<Block>());
  Block& block = *blocks[rank];
  block.cluster = this;
  block.rank = rank;
  block.index = index;
  block.live = threads;
  block.mbarriers.clear();
  block.published.clear();
  block.warp_groups.clear();
  block.warp_groups.resize((threads + WarpGroup::kThreads - 1) / WarpGroup::kThreads);
  for (Barrier& barrier : block.barriers) barrier = Barrier{};
  prepare_shared(block, rank);

  block.fibers.resize(threads);
  block.warps.resize((threads + kLanes - 1) / kLanes);
  block.ready_warps = 0;
  for (unsigned t = 0; t < threads; ++t) {
    const std::size_t slot = static_cast<std::size_t>(rank) * threads + t;
    while (stacks.size() <= slot) {
      stacks.push_back(std::make_unique<Stack>(stacks.size()));
      new (stacks.back()->high() - fiber_bytes()) Fiber();
    }
    Stack& stack = *stacks[slot];
    Fiber& fiber = fiber_of(stack);
    fiber.thread_index = {t % launch->block[0], t / launch->block[0] % launch->block[1],
                          t / launch->block[0] / launch->block[1]};
    fiber.block_index = index;
    fiber.block_dim = dim3{launch->block[0], launch->block[1], launch->block[2]};
    fiber.grid_dim = dim3{launch->grid[0], launch->grid[1], launch->grid[2]};
    fiber.lane = t % kLanes;
    fiber.cluster_rank = rank;
    fiber.cluster_blocks = num_blocks;
    fiber.dynamic_shared = block.dynamic_shared;
    fiber.stack_pointer = prepare_stack(stack.high() - fiber_bytes(), fiber_main);
    fiber.stack_low = stack.low();
    fiber.block = &block;
    fiber.warp = &block.warps[t / kLanes];
    fiber.index = t;
    fiber.agent = static_cast<unsigned>(slot);
    fiber.state = State::Ready;
    fiber.polls = 0;
    fiber.converging = nullptr;
    fiber.call = nullptr;
    fiber.cluster_arrived = false;
    fiber.polled = nullptr;
    fiber.has_deferred = false;
    fiber.guess = Guess{};
    fiber.copies = CopyGroups{};
    fiber.bulk = BulkGroups{};
    fiber.epoch = base_epoch + 1;
    fiber.fence_epoch = base_epoch;
    fiber.mbarrier_fence_epoch = base_epoch;
    fiber.registers.start();
    fiber.fenced = nullptr;
    block.fibers[t] = &fiber;
  }
  for (unsigned w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    warp.first = w * kLanes;
    const unsigned count = std::min(kLanes, threads - warp.first);
    warp.lanes = count == kLanes ? ~0u : (1u << count) - 1;
    warp.live = warp.lanes;
    warp.rendezvous.clear();
    warp.ready = 0;  // a launch ended by a fault leaves bits set
    make_ready(block, warp, warp.lanes);
  }
}

}  // namespace cukit::emulator
