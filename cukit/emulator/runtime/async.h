// What goes on in the background: cp.async, bulk copies, mbarriers and wgmma.
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

// Something that an engine does: at once, or, in the late mode, when somebody waits for it.
using Work = std::function<void()>;

// A copy into shared memory that nobody has waited for yet.
struct Landing {
  Block* block;
  unsigned char* pointer;
  std::size_t bytes;
  std::uint32_t phase;  // of the mbarrier it reports to
  Actor actor;
};

// A thread's cp.async copies, by group.
struct Copy {
  std::uint64_t group;
  unsigned char* to;
  unsigned bytes;
  Work work;  // empty if done
};

struct CopyGroups {
  std::uint64_t open = 0;  // number of the group that copies now join
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
  std::int64_t transactions = 0;  // bytes still to come in this phase
  std::uint32_t phase = 0;        // number of phases completed
  std::vector<unsigned> arrivals; // agents that have arrived in this phase
  std::vector<Fiber*> waiters;
  std::vector<Work> late;         // copies that report here
  std::vector<Landing> landings;
  unsigned engine = 0;
  const Fiber* initialiser = nullptr;
  std::uint32_t initialised = 0;  // in this epoch of its
  const void* initialised_call = nullptr;
  Clock* joined = nullptr;        // of this phase
  Clock* completed = nullptr;     // of the last
};

// A warpgroup's products, by group.
struct WarpGroup {
  static constexpr unsigned kWarps = 4;
  static constexpr unsigned kThreads = 128;

  // Threads that have come to an instruction of the whole warpgroup and wait for the others.
  struct Meeting {
    const char* name = nullptr;  // null while nobody has come
    unsigned arrived[kWarps] = {};
    unsigned count = 0;
    const void* call = nullptr;
  };
  struct Product {
    std::uint64_t group;
    std::uint32_t number;          // of Cluster::register_events
    std::uint32_t epochs[kWarps];  // of the warps' engines
    const void* call;
    std::size_t accumulators;      // where they lie on each thread's stack
    unsigned count;                // of a thread
    Work work;                     // empty if done
  };
  // Accumulators by the shape of the products that used them since the last fence.
  struct Shaped {
    std::size_t low, high;  // of the stack
    unsigned shape;
  };
  // True values of accumulators that products in flight will change, by the first thread's place.
  struct Hidden {
    unsigned products = 0;
    std::vector<float> values;
  };
  Meeting meeting;
  std::uint64_t open = 0;  // number of the group that products now join
  std::vector<Product> products;
  std::vector<Shaped> shaped;
  const void* fence_call = nullptr;
  std::unordered_map<float*, Hidden> hidden;
};

}  // namespace cukit::emulator
