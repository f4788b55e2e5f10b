// State of the asynchronous operations: cp.async, bulk copies, mbarriers and wgmma.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "clocks.h"
#include "shadow.h"

namespace cukit::emulator {

struct Block;
struct Fiber;

// An engine's work: done immediately, or, in the late mode, when a thread waits for it.
using Work = std::function<void()>;

// A copy into shared memory that no thread has waited for yet.
struct PendingCopy {
  Block* block;
  unsigned char* pointer;
  std::size_t bytes;
  std::uint32_t phase;  // of the mbarrier it completes on
  Actor actor;
};

// One cp.async copy of a thread.
struct Copy {
  std::uint64_t group;
  unsigned char* to;
  unsigned bytes;
  Work work;  // empty once done
};

// A thread's cp.async copies, by group.
struct CopyGroups {
  std::uint64_t open = 0;  // number of the group that new copies join
  std::vector<Copy> copies;
};

// A thread's bulk copies from shared to global memory, by group.
struct BulkGroups {
  struct Item {
    std::uint64_t group;
    unsigned engine;
    std::uint32_t epoch;
    Work work;
  };
  std::uint64_t open = 0;
  std::vector<Item> items;
};

struct Mbarrier {
  std::uint32_t expected = 0;
  std::uint32_t pending = 0;
  std::int64_t transactions = 0;  // bytes still missing in this phase
  std::uint32_t phase = 0;        // number of phases completed
  std::vector<unsigned> arrivals; // agents that have arrived in this phase
  std::vector<Fiber*> waiters;
  std::vector<Work> late;         // deferred copies that complete on it
  std::vector<PendingCopy> pending_copies;
  unsigned engine = 0;
  const Fiber* initialiser = nullptr;
  std::uint32_t initialised = 0;  // the initialiser's epoch
  const void* initialised_call = nullptr;
  Clock* joined = nullptr;        // clocks of this phase's arrivals
  Clock* completed = nullptr;     // clocks of the arrivals in the last completed phase
};

// A warpgroup's wgmmas, by group.
struct WarpGroup {
  static constexpr unsigned kWarps = 4;
  static constexpr unsigned kThreads = 128;

  // Threads that have reached a warpgroup-wide instruction and wait for the others.
  struct WarpgroupRendezvous {
    const char* name = nullptr;  // null until the first thread arrives
    unsigned arrived[kWarps] = {};
    unsigned count = 0;
    const void* call = nullptr;
  };
  struct Product {
    std::uint64_t group;
    std::uint32_t number;          // of ClusterRunner::register_events
    std::uint32_t epochs[kWarps];  // of the warps' engines
    const void* call;
    std::size_t accumulators;      // offset in each thread's stack
    unsigned count;                // accumulators of one thread
    Work work;                     // empty once done
  };
  // Accumulators, with the shape of the wgmmas that have used them since the last fence.
  struct Shaped {
    std::size_t low, high;  // offsets in the stack
    unsigned shape;
  };
  // Late mode: values of accumulators of wgmmas in flight, by address in the warpgroup's first
  // thread.
  struct Hidden {
    unsigned products = 0;
    std::vector<float> values;
  };
  WarpgroupRendezvous rendezvous;
  std::uint64_t open = 0;  // number of the group that new wgmmas join
  std::vector<Product> products;
  std::vector<Shaped> shaped;
  const void* fence_call = nullptr;
  std::unordered_map<float*, Hidden> hidden;
};

}  // namespace cukit::emulator
