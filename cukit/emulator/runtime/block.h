// The machine: fibers, warps, blocks and clusters, and the scheduler that runs a cluster on one
// thread of the operating system.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "async.h"
#include "clocks.h"
#include "common/emulator/entry.h"
#include "common/emulator/thread.h"
#include "fiber.h"
#include "registers.h"
#include "shadow.h"

namespace cukit::emulator {

constexpr unsigned kLanes = 32;
constexpr unsigned kNamedBarriers = 16;
constexpr unsigned kEngines = 64;  // agents beside the threads: copies and products in the background

struct Block;
struct Cluster;
struct Warp;

enum class State : std::uint8_t { Ready, Waiting, Exited };

// A write that would be a race, were its value not the one that is there: judged once it is done.
struct Suspect {
  const unsigned char* pointer;
  unsigned bytes;  // 0 if there is none
  unsigned char before[16];
};

// What has to wait until a load or store that is about to happen has happened.
struct Deferred {
  const void* learn_from = nullptr;
  Suspect suspect{};
  std::string report;
};

// What a thread read last of what others change by atomics.
struct Guess {
  const void* pointer = nullptr;
  std::uint32_t call = 0;   // where the load is
  std::uint32_t epoch = 0;  // of the thread
};

// A CUDA thread. It lies at the top of its own stack.
struct Fiber : Thread {
  void* stack_pointer = nullptr;
  unsigned char* stack_low = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0;  // in its block
  unsigned agent = 0;  // in its cluster
  State state = State::Ready;

  const void* call = nullptr;      // where the kernel called the emulator last
  const char* waits_for = nullptr; // of a waiting fiber: a format for the two numbers
  unsigned wait_numbers[2] = {};
  unsigned polls = 0;
  unsigned atomics = 0;
  const void* polled = nullptr;    // what it read atomically last
  bool has_deferred = false;
  Deferred deferred;
  Guess guess;

  std::uint64_t value = 0;         // what it brings to a warp collective, and takes from it
  unsigned argument = 0, width = 0;
  const void* operands = nullptr;  // of an instruction of the whole warp
  std::uint64_t cluster_generation = 0;  // of the cluster barrier when it arrived there
  bool cluster_arrived = false;    // and has not waited yet
  int vote = 0;                    // what it takes from a voting barrier
  const void* converging = nullptr;  // where it waits for the lanes that are with it
  unsigned converged = 0;            // and those that were

  Clock* seen = nullptr;
  Clock* fenced = nullptr;         // what it had seen at its last proxy fence
  std::uint32_t epoch = 0;
  std::uint32_t fence_epoch = 0;   // its own accesses up to here are visible to the async proxy
  std::uint32_t mbarrier_fence_epoch = 0;  // mbarriers that it initialised up to here, to the cluster
  Registers registers;

  CopyGroups copies;               // cp.async
  BulkGroups bulk;                 // cp.async.bulk towards global memory
};

// Lanes that have come to one warp collective and wait for the rest of its mask.
struct Meeting {
  const char* name;
  void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes);
  unsigned kind;
  unsigned mask;
  unsigned arrived;
  bool whole;  // an instruction of all lanes, which one that has exited is missing from
};

struct Warp {
  unsigned first = 0;  // thread
  unsigned lanes = 0;  // that exist
  unsigned live = 0;   // that have not exited
  unsigned ready = 0;  // that could run now
  std::vector<Meeting> meetings;
};

struct Barrier {
  unsigned expected = 0;  // threads; 0 while nobody has come
  unsigned arrived = 0;
  unsigned waiters = 0;           // of those that have arrived
  bool whole = false;             // of all threads of the block, less those that have exited
  unsigned waiting[kLanes] = {};  // lanes of each warp
  const void* first_call = nullptr;
  int line[kLanes] = {};          // where each warp's first lane came from
  BlockVote vote = BlockVote::None;
  int votes_true = 0;
  Clock* joined = nullptr;
};

struct Block {
  Cluster* cluster = nullptr;
  unsigned rank = 0;
  uint3 index{};
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  unsigned ready_warps = 0;
  unsigned live = 0;
  Barrier barriers[kNamedBarriers];
  std::unordered_map<std::uint32_t, Mbarrier> mbarriers;
  std::vector<WarpGroup> warp_groups;

  // Static shared memory lives at `static_shared` while this block is the resident one of its
  // cluster, and in `static_copy` otherwise.
  unsigned char* static_shared = nullptr;
  std::vector<unsigned char> static_copy;
  unsigned char* dynamic_shared = nullptr;
  std::unique_ptr<unsigned char[]> dynamic_storage;
  std::size_t dynamic_capacity = 0;
  Shadow shadow;
  // What every access needs to know of the cluster and the launch.
  std::size_t static_bytes = 0, dynamic_bytes = 0;
  std::uintptr_t code_base = 0;
  std::uint32_t base_epoch = 0;
  bool global_races = false;
  std::unordered_map<std::uintptr_t, Published> published;  // at addresses of shared memory

  Fiber& lane(const Warp& warp, unsigned i) { return *fibers[warp.first + i]; }
};

struct Range {
  std::uintptr_t low, high;
  std::uint32_t argument;
  std::uint32_t writeable;
  std::uint64_t element_bytes;
};

// One kernel launch, shared by all workers. Filled in by the caller (cukit/emulator/library.py).
struct Launch {
  const Entry* entry;
  void** arguments;
  const Range* ranges;  // sorted
  std::uint32_t num_ranges;
  std::uint32_t num_shared;
  const std::uint32_t (*shared)[2];  // first byte and size of each __shared__ variable, sorted
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t cluster[3];
  std::uint32_t dynamic_bytes;
  std::uint32_t most_workers;
  std::uint32_t checked;
  std::uint32_t late;
  std::uint32_t global_races;
  std::uint32_t same_value_writes;
  std::uint32_t cas_guesses;    // are reported, too
  std::uint64_t seed;
  std::uint32_t interruptible;  // Ctrl-C ends it
  std::uint32_t arch;           // the GPU's, as 900 for sm_90
  double patience;  // seconds
  char* message;
  std::uint32_t message_bytes;
};

struct Module {  // the kernel's shared object
  std::uintptr_t base = 0, end = 0;
  std::uintptr_t data_low = 0, data_high = 0;  // __device__ variables among other things
  std::size_t static_bytes = 0;
  std::size_t tls_module = 0;
};

struct Run;  // a launch in progress (launch.cpp)
struct Worker;

// The state of all workers when one of them last made a step.
struct Watch {
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> polls;
  std::chrono::steady_clock::time_point since{};
};

struct Cluster {
  Run* run = nullptr;
  Worker* worker = nullptr;
  const Launch* launch = nullptr;
  const Module* module = nullptr;
  void* main_stack = nullptr;
  std::vector<std::unique_ptr<Stack>> stacks;
  std::vector<std::unique_ptr<Block>> blocks;
  std::uint64_t number = 0;
  unsigned num_blocks = 0;
  unsigned threads = 0;  // of a block
  unsigned live = 0;
  Block* resident = nullptr;
  std::uint64_t random = 0;
  // Progress, over all launches: whatever changes memory or lets a thread go on, polls left out.
  std::uint64_t steps = 0;
  Watch watch;

  unsigned arrived = 0;  // at the cluster barrier
  std::uint64_t generation = 0;
  Clock* cluster_joined = nullptr;
  Clock* cluster_last = nullptr;

  ClockPool clocks;
  std::uint32_t base_epoch = 0;  // every access of earlier clusters is at or before it
  std::uint32_t newest_epoch = 0;
  std::uint32_t engine_epoch[kEngines] = {};
  std::uint32_t register_events = 0;  // fences and products of wgmma, over all launches

  ~Cluster();
  // Runs the cluster of this number to its end, or until any worker finds a fault.
  void execute(std::uint64_t number);

  unsigned first_engine() const { return num_blocks * threads; }

 private:
  void prepare(std::uint64_t number);
  void prepare_block(unsigned rank, uint3 index);
};

// The scheduler --------------------------------------------------------------------------------

inline Fiber& current() { return *static_cast<Fiber*>(cukit_emulator_thread); }

// To be called first in every call from a kernel: remembers where from.
#define CUKIT_ENTER(name)                                     \
  ::cukit::emulator::Fiber& name = ::cukit::emulator::current(); \
  ::cukit::emulator::settle(name);                            \
  name.call = __builtin_return_address(0)

// Does what the thread has put off until after its last load or store.
void settle_now(Fiber& me);
inline void settle(Fiber& me) {
  if (__builtin_expect(me.has_deferred, false)) settle_now(me);
}

// The running fiber waits for somebody to call make_ready. `what` says for what, should that never
// happen: a format for the two numbers.
void wait_for(const char* what, unsigned first = 0, unsigned second = 0);
constexpr const char* kClusterWait = "the cluster barrier";
void make_ready(Block& block, Warp& warp, unsigned lanes);
inline void make_ready(Fiber& fiber) { make_ready(*fiber.block, *fiber.warp, 1u << fiber.lane); }
// Lets others run now if the seed says so: after a barrier any thread may be first.
void shuffle_order();
std::uint32_t random_number(Cluster& cluster);

// Comes back when every live lane of `mask` has called it with the same arguments; `complete` runs
// once, before anybody comes back.
void meet(unsigned kind, unsigned mask, const char* name,
          void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes), bool whole = false);
// The same for an instruction of a whole warp: comes back when all its 32 lanes have called it.
inline void meet_warp(unsigned kind, const char* name,
                      void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes)) {
  meet(kind, ~0u, name, complete, true);
}
// The same for an instruction of a warpgroup: for the 128 threads of four warps, from a multiple of
// four on. Ends the launch if some of them come to another one.
void meet_warp_group(const char* name, void (*complete)(Block&, unsigned group));

// A thread has exited: barriers of the whole block need not wait for it.
void open_block_barriers(Block& block);
// Whether a byte of static shared memory is the compiler's, who keeps there whether an object beside it has
// been constructed. CUDA has only objects whose constructors do nothing: what the byte holds never matters.
bool is_guard(const Module& module, std::size_t byte);
// What the barriers lack that threads wait at, a line each: arrivals, and bytes of copies.
std::string stuck_barriers(const Cluster& cluster);
// "0-31, 64" for sorted numbers.
std::string list_of(const std::vector<unsigned>& threads);
// Everybody has arrived at the cluster barrier, or exited.
void open_cluster_barrier(Cluster& cluster);

// Instructions of whole warps and warpgroups that wait for threads which have not come: a line each.
std::string missing_threads(const Cluster& cluster);

// Who waits where for what, and who has exited: lines that each begin with a newline.
std::string waiting_threads(const Cluster& cluster);

// Leaves the cluster as it stands: execute() returns.
[[noreturn]] void leave(Cluster& cluster);

// Starts what was put off in the late mode. False if there is nothing that would help.
bool finish_late_work(Cluster& cluster);

// Ends the launch. In the text, where(address) becomes a source line (cukit/emulator/report.py).
[[noreturn]] void fault(const std::string& text);
std::string where(const void* call);
std::string name_of(const Fiber& fiber);
// The same for a thread of any cluster of the launch, by its agent.
std::string name_of_thread(const Run& run, std::uint64_t cluster, unsigned agent);
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

struct Place {
  Block* block;
  unsigned char* pointer;
};
// GPUs that have an instruction: from the one on, up to the other.
struct Archs {
  std::uint32_t first, last;
};
constexpr Archs kSinceAda{890, ~0u};
constexpr Archs kSinceHopper{900, ~0u};
constexpr Archs kOnlyHopper{900, 900};
[[noreturn]] void lacks(const Fiber& me, Archs archs, const char* instruction);
// Ends the launch if the GPU that is emulated lacks the instruction.
inline void require(const Fiber& me, Archs archs, const char* instruction) {
  const std::uint32_t arch = me.block->cluster->launch->arch;
  if (arch < archs.first || arch > archs.last) lacks(me, archs, instruction);
}

// Where a shared::cluster address lies. Ends the launch unless `bytes` of it are shared memory.
Place place_of(const Fiber& fiber, std::uint32_t address, std::size_t bytes);

// Without the rank of a shared::cluster address.
std::uint32_t local_address(std::uint32_t address);

// Happens-before -----------------------------------------------------------------------------------

inline bool checked() { return current().block->cluster->launch->checked != 0; }
// The fiber's knowledge goes into *into (created if null), and its next accesses come after.
void release_to(Fiber& fiber, Clock** into);
// The fiber knows what `from` knows.
void acquire_from(Fiber& fiber, const Clock* from);
void advance(Fiber& fiber);

}  // namespace cukit::emulator
