// The emulated machine: fibers, warps, blocks and clusters, and the scheduler that runs a cluster
// on one OS thread.
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
constexpr unsigned kEngines = 64;  // agents besides the threads: asynchronous copies and wgmma

struct Block;
struct ClusterRunner;
struct Warp;

enum class State : std::uint8_t { Ready, Waiting, Exited };

// A write that is a race unless it stores the value that is already there; judged after the store.
struct RacingStore {
  const unsigned char* pointer;
  unsigned bytes;  // 0 if there is none
  unsigned char before[16];
};

// Work deferred until the load or store being checked has executed.
struct Deferred {
  const void* acquire_address = nullptr;
  RacingStore store{};
  std::string report;
};

// The thread's last plain load that raced with an atomic: perhaps the first guess of an atomicCAS
// loop (guesses.h).
struct Guess {
  const void* pointer = nullptr;
  std::uint32_t call = 0;   // offset of the load in the kernel's code
  std::uint32_t epoch = 0;  // of the thread
};

// A CUDA thread, stored at the top of its own stack.
struct Fiber : Thread {
  void* stack_pointer = nullptr;
  unsigned char* stack_low = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0;  // in its block
  unsigned agent = 0;  // in its cluster
  State state = State::Ready;

  const void* call = nullptr;      // return address of the kernel's last call into the emulator
  const char* waits_for = nullptr; // description of the wait: a printf format for wait_numbers
  unsigned wait_numbers[2] = {};
  unsigned polls = 0;
  unsigned atomics = 0;
  const void* polled = nullptr;    // address of its last atomic or volatile access
  bool has_deferred = false;
  Deferred deferred;
  Guess guess;

  std::uint64_t value = 0;         // operand, then result, of a warp collective
  unsigned argument = 0, width = 0;
  const void* operands = nullptr;  // of a warp-wide or warpgroup-wide instruction
  std::uint64_t cluster_generation = 0;  // of the cluster barrier when this thread arrived
  bool cluster_arrived = false;    // has arrived at the cluster barrier, but not waited yet
  int vote = 0;                    // result of a voting barrier, such as __syncthreads_count
  const void* converging = nullptr;  // call site of the coalesced group being formed
  unsigned converged = 0;            // lanes of the group formed last

  Clock* seen = nullptr;
  Clock* fenced = nullptr;         // `seen` at its last proxy fence
  std::uint32_t epoch = 0;
  std::uint32_t fence_epoch = 0;   // its own accesses up to here are visible to the async proxy
  std::uint32_t mbarrier_fence_epoch = 0;  // its mbarriers up to here are visible to the cluster
  Registers registers;

  CopyGroups copies;               // cp.async
  BulkGroups bulk;                 // cp.async.bulk to global memory
};

// Lanes that have reached one warp collective and wait for the rest of its mask.
struct WarpRendezvous {
  const char* name;
  void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes);
  unsigned kind;
  unsigned mask;
  unsigned arrived;
  bool whole;  // needs all 32 lanes, exited ones included
};

struct Warp {
  unsigned first = 0;  // index of its first thread
  unsigned lanes = 0;  // mask of lanes that exist
  unsigned live = 0;   // mask of lanes that have not exited
  unsigned ready = 0;  // mask of lanes that can run
  std::vector<WarpRendezvous> rendezvous;
};

struct Barrier {
  unsigned expected = 0;  // threads; 0 until the first one arrives
  unsigned arrived = 0;
  unsigned waiters = 0;           // arrived threads that also wait
  bool whole = false;             // expects all threads of the block that have not exited
  unsigned waiting[kLanes] = {};  // waiting lanes of each warp
  const void* first_call = nullptr;
  int line[kLanes] = {};          // source line of each warp's first arrival
  BlockVote vote = BlockVote::None;
  int votes_true = 0;
  Clock* joined = nullptr;
};

struct Block {
  ClusterRunner* cluster = nullptr;
  unsigned rank = 0;
  uint3 index{};
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  unsigned ready_warps = 0;
  unsigned live = 0;
  Barrier barriers[kNamedBarriers];
  std::unordered_map<std::uint32_t, Mbarrier> mbarriers;
  std::vector<WarpGroup> warp_groups;

  // Static shared memory is at `static_shared` while this block is its cluster's resident one, and
  // in `static_copy` otherwise.
  unsigned char* static_shared = nullptr;
  std::vector<unsigned char> static_copy;
  unsigned char* dynamic_shared = nullptr;
  std::unique_ptr<unsigned char[]> dynamic_storage;
  std::size_t dynamic_capacity = 0;
  Shadow shadow;
  // Fields of the cluster and the launch that every check reads.
  std::size_t static_bytes = 0, dynamic_bytes = 0;
  std::uintptr_t code_base = 0;
  std::uint32_t base_epoch = 0;
  bool global_races = false;
  std::unordered_map<std::uintptr_t, Published> published;  // by address in shared memory

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
  std::uint32_t max_workers;
  std::uint32_t checked;
  std::uint32_t late;
  std::uint32_t global_races;
  std::uint32_t same_value_writes;
  std::uint32_t cas_guesses;    // also report races of first guesses for atomicCAS
  std::uint64_t seed;
  std::uint32_t interruptible;  // Ctrl-C ends the launch
  std::uint32_t arch;           // of the emulated GPU: 900 for sm_90
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

struct Run;  // a launch in progress (run.h)
struct Worker;

// A snapshot of all workers, taken when one of them last made progress.
struct Watch {
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> polls;
  std::chrono::steady_clock::time_point since{};
};

// Runs clusters, one after another, on a worker's OS thread. Keeps its stacks, blocks and shadows
// from cluster to cluster and from launch to launch.
struct ClusterRunner {
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
  // Progress, not reset between launches: counts memory writes, ends of waits, exits and finished
  // clusters, but no polls.
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
  std::uint32_t register_events = 0;  // wgmma fences and wgmmas, over all launches

  ~ClusterRunner();
  // Runs the cluster of this number to its end, or until any worker finds a fault.
  void execute(std::uint64_t number);

  unsigned first_engine() const { return num_blocks * threads; }

 private:
  void prepare(std::uint64_t number);
  void prepare_block(unsigned rank, uint3 index);
};

// The scheduler --------------------------------------------------------------------------------

inline Fiber& current() { return *static_cast<Fiber*>(cukit_emulator_thread); }

// The first statement of every function that a kernel calls: records the call site.
#define CUKIT_ENTER(name)                                     \
  ::cukit::emulator::Fiber& name = ::cukit::emulator::current(); \
  ::cukit::emulator::run_deferred(name);                            \
  name.call = __builtin_return_address(0)

// Does the work that the thread has deferred until after its last load or store.
void run_deferred_now(Fiber& me);
inline void run_deferred(Fiber& me) {
  if (__builtin_expect(me.has_deferred, false)) run_deferred_now(me);
}

// Blocks the running fiber until make_ready is called for it. `what` describes the wait in a
// deadlock report: a printf format for the two numbers.
void wait_for(const char* what, unsigned first = 0, unsigned second = 0);
constexpr const char* kClusterWait = "the cluster barrier";
void make_ready(Block& block, Warp& warp, unsigned lanes);
inline void make_ready(Fiber& fiber) { make_ready(*fiber.block, *fiber.warp, 1u << fiber.lane); }
// Switches to another fiber if the launch has a seed: after a barrier any thread may run first.
void shuffle_order();
std::uint32_t random_number(ClusterRunner& cluster);

// Returns once every live lane of `mask` has called it with the same arguments; `complete` runs
// once, before any call returns.
void meet(unsigned kind, unsigned mask, const char* name,
          void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes), bool whole = false);
// The same for a warp-wide instruction: returns once all 32 lanes have called it.
inline void meet_warp(unsigned kind, const char* name,
                      void (*complete)(Block&, Warp&, unsigned kind, unsigned lanes)) {
  meet(kind, ~0u, name, complete, true);
}
// The same for a warpgroup-wide instruction of 128 threads: four consecutive warps, starting at a
// multiple of four. Ends the launch if some of them reach another warpgroup-wide instruction.
void meet_warp_group(const char* name, void (*complete)(Block&, unsigned group));

// Called when a thread has exited: opens the block-wide barriers that waited only for that thread.
void open_block_barriers(Block& block);
// Whether a byte of static shared memory belongs to a guard variable, in which the compiler records
// that an object has been constructed. CUDA allows only objects with empty constructors, so its
// value never matters.
bool is_guard(const Module& module, std::size_t byte);
// One line for each barrier that threads wait at: the arrivals and the bytes of copies it is
// missing.
std::string stuck_barriers(const ClusterRunner& cluster);
// "0-31, 64" for sorted numbers.
std::string list_of(const std::vector<unsigned>& threads);
// To be called when every thread has arrived at the cluster barrier or exited.
void open_cluster_barrier(ClusterRunner& cluster);

// One line for each warp-wide or warpgroup-wide instruction that is missing threads.
std::string missing_threads(const ClusterRunner& cluster);

// Which threads wait, where and for what, and which have exited: each line begins with a newline.
std::string waiting_threads(const ClusterRunner& cluster);

// Abandons the cluster's threads: execute() returns.
[[noreturn]] void abandon(ClusterRunner& cluster);

// Does the work that the late mode has deferred and threads wait for. False if there is none.
bool finish_late_work(ClusterRunner& cluster);

// Ends the launch with this report; cukit/emulator/report.py turns where(address) into a source
// line.
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
// The architectures that have an instruction: `first` to `last`.
struct Archs {
  std::uint32_t first, last;
};
constexpr Archs kSinceAda{890, ~0u};
constexpr Archs kSinceHopper{900, ~0u};
constexpr Archs kOnlyHopper{900, 900};
[[noreturn]] void missing_instruction(const Fiber& me, Archs archs, const char* instruction);
// Ends the launch if the emulated GPU lacks the instruction.
inline void require(const Fiber& me, Archs archs, const char* instruction) {
  const std::uint32_t arch = me.block->cluster->launch->arch;
  if (arch < archs.first || arch > archs.last) missing_instruction(me, archs, instruction);
}

// The block and the pointer of a shared::cluster address. Ends the launch unless all `bytes` are
// shared memory.
Place place_of(const Fiber& fiber, std::uint32_t address, std::size_t bytes);

// A shared::cluster address without its rank.
std::uint32_t local_address(std::uint32_t address);

// Happens-before -----------------------------------------------------------------------------------

inline bool checked() { return current().block->cluster->launch->checked != 0; }
// Merges the fiber's vector clock into *into (created if null) and starts the fiber's next epoch.
void release_to(Fiber& fiber, Clock** into);
// Merges `from` into the fiber's vector clock.
void acquire_from(Fiber& fiber, const Clock* from);
void advance(Fiber& fiber);

}  // namespace cukit::emulator
