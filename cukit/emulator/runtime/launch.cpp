// Runs a launch: its workers, its clusters, and the report of a fault.
#include <link.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

#include "run.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

extern "C" void* __tls_get_addr(void*);

namespace cukit::emulator {

namespace {

// While alive, flushes subnormal floats to zero, as -ftz=true does on the GPU.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | 1ull << 24));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  unsigned long long before_;
#endif
};

int find_module(dl_phdr_info* info, std::size_t, void* data) {
  auto& [address, module] = *static_cast<std::pair<std::uintptr_t, Module>*>(data);
  Module found;
  found.base = info->dlpi_addr;
  bool here = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    const std::uintptr_t low = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD) {
      here = here || (address >= low && address < low + header.p_memsz);
      found.end = std::max(found.end, low + header.p_memsz);
      if (header.p_flags & PF_W) {
        found.data_low = low;
        found.data_high = low + header.p_memsz;
      }
    }
    if (header.p_type == PT_TLS) {
      found.static_bytes = header.p_memsz;
      found.tls_module = info->dlpi_tls_modid;
    }
  }
  if (!here) return 0;
  module = found;
  return 1;
}

// This thread's instance of the kernel's __shared__ variables.
unsigned char* static_shared_of(const Module& module) {
  if (module.static_bytes == 0) return nullptr;
  std::size_t index[2] = {module.tls_module, 0};
  return static_cast<unsigned char*>(__tls_get_addr(index));
}

// Runners keep their stacks and shadows from launch to launch.
std::mutex idle_mutex;
std::vector<std::unique_ptr<ClusterRunner>> idle_runners;

std::unique_ptr<ClusterRunner> take_runner() {
  const std::lock_guard<std::mutex> lock(idle_mutex);
  if (idle_runners.empty()) return std::make_unique<ClusterRunner>();
  std::unique_ptr<ClusterRunner> runner = std::move(idle_runners.back());
  idle_runners.pop_back();
  return runner;
}

}  // namespace

void work(Run& run, Worker& worker) {
  const FlushSubnormals flush;
  std::unique_ptr<ClusterRunner> runner = take_runner();
  runner->run = &run;
  runner->worker = &worker;
  runner->watch = Watch{};
  runner->launch = run.launch;
  runner->module = &run.module;
  const WorkerGuard guard(*runner);
  try {
    for (;;) {
      const std::uint64_t number = run.next.fetch_add(1, std::memory_order_relaxed);
      if (number >= run.clusters || run.stopped()) break;
      runner->execute(number);
      ++runner->steps;
    }
  } catch (const std::bad_alloc&) {
    run.record("the host is out of memory for the stacks and shared memory of the blocks");
    worker.done.store(true, std::memory_order_release);
    return;  // and destroy the runner, whose cluster is only half prepared
  }
  worker.steps.store(runner->steps, std::memory_order_relaxed);
  worker.done.store(true, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(idle_mutex);
  idle_runners.push_back(std::move(runner));
}

std::size_t fiber_bytes() { return (sizeof(Fiber) + 63) / 64 * 64; }

Fiber& fiber_of(const Stack& stack) {
  return *reinterpret_cast<Fiber*>(stack.high() - fiber_bytes());
}

ClusterRunner::~ClusterRunner() {
  for (const auto& stack : stacks) fiber_of(*stack).~Fiber();
}

void ClusterRunner::prepare(std::uint64_t number) {
  num_blocks = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
  threads = launch->block[0] * launch->block[1] * launch->block[2];
  live = num_blocks * threads;
  arrived = 0;
  generation = 0;
  cluster_joined = cluster_last = nullptr;
  resident = nullptr;
  random = launch->seed * 0x9E3779B97F4A7C15ull + (number + 1) * 0xD1B54A32D192ED03ull;
  random ^= random >> 29;
  if (random == 0) random = 1;
  if (launch->seed != 0) {
    // A different order of blocks: multiplying by an odd number coprime to the count permutes them.
    std::uint64_t step = 0x9E3779B1u % run->clusters | 1;
    while (std::gcd(step, run->clusters) != 1) step += 2;
    number = (number * step + launch->seed) % run->clusters;
  }
  if (register_events > Registers::kMaxEvents) {
    register_events = 0;
    for (const auto& stack : stacks) fiber_of(*stack).registers.clear();
  }
  base_epoch = newest_epoch;
  newest_epoch = base_epoch + 1;
  std::fill(std::begin(engine_epoch), std::end(engine_epoch), base_epoch + 1);

  this->number = number;
  for (unsigned rank = 0; rank < num_blocks; ++rank) {
    prepare_block(rank, index_of_block(*run, number, rank));
  }
  if (launch->checked) {
    clocks.reset(num_blocks * threads + kEngines);
    Clock* start = clocks.filled(base_epoch);
    for (unsigned rank = 0; rank < num_blocks; ++rank) {
      for (Fiber* fiber : blocks[rank]->fibers) fiber->seen = ClockPool::hold(start);
    }
  }
}

uint3 index_of_block(const Run& run, std::uint64_t cluster, unsigned rank) {
  const std::uint32_t* const shape = run.launch->cluster;
  const std::uint64_t* const along = run.clusters_along;
  return {static_cast<unsigned>(cluster % along[0] * shape[0] + rank % shape[0]),
          static_cast<unsigned>(cluster / along[0] % along[1] * shape[1] + rank / shape[0] % shape[1]),
          static_cast<unsigned>(cluster / along[0] / along[1] * shape[2] +
                                rank / shape[0] / shape[1])};
}

// Fills shared memory with NaN before each block.
void prepare_shared(Block& block, unsigned rank) {
  constexpr std::size_t kAlignment = 1024;
  ClusterRunner& cluster = *block.cluster;
  const std::size_t static_bytes = cluster.module->static_bytes;
  block.static_shared = static_shared_of(*cluster.module);
  if (static_bytes > 0 && rank == 0) std::memset(block.static_shared, 0xff, static_bytes);
  block.static_copy.assign(cluster.num_blocks > 1 ? static_bytes : 0, 0xff);

  const std::size_t dynamic_bytes = cluster.launch->dynamic_bytes;
  if (block.dynamic_capacity < dynamic_bytes || block.dynamic_storage == nullptr) {
    block.dynamic_storage.reset(new unsigned char[dynamic_bytes + kAlignment]);
    block.dynamic_capacity = dynamic_bytes;
  }
  const auto start = reinterpret_cast<std::uintptr_t>(block.dynamic_storage.get());
  block.dynamic_shared =
      reinterpret_cast<unsigned char*>((start + kAlignment - 1) / kAlignment * kAlignment);
  std::memset(block.dynamic_shared, 0xff, dynamic_bytes);
  block.static_bytes = static_bytes;
  block.dynamic_bytes = dynamic_bytes;
  block.code_base = cluster.module->base;
  block.base_epoch = cluster.base_epoch;
  block.global_races = cluster.launch->global_races != 0;
  if (cluster.launch->checked) {
    block.shadow.static_cells.cover(static_bytes);
    block.shadow.dynamic_cells.cover(dynamic_bytes);
    block.shadow.forget_global();
  }
}

void Run::join() {
  // A running worker may start more of them.
  for (std::size_t i = 0;; ++i) {
    std::unique_lock<std::mutex> lock(mutex);
    if (i == threads.size()) return;
    std::thread thread = std::move(threads[i]);
    lock.unlock();
    thread.join();
  }
}

void Run::record(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (message.empty()) message = text;
  faulty.store(true, std::memory_order_relaxed);
}

void Run::check_patience(Fiber& me) {
  constexpr unsigned kPolls = 1024;
  constexpr std::chrono::milliseconds kShort{5};
  ClusterRunner& cluster = *me.block->cluster;
  Worker& mine = *cluster.worker;
  mine.steps.store(cluster.steps, std::memory_order_relaxed);
  mine.polls.fetch_add(1, std::memory_order_release);
  if (++me.polls % kPolls != 0) return;
  std::this_thread::yield();

  // A worker that computes, or that the OS has descheduled, does not poll. Once every worker has polled
  // often enough for every thread of its cluster to have had a turn, no running thread can end the wait.
  const auto now = std::chrono::steady_clock::now();
  Watch& watch = cluster.watch;
  const std::size_t count = started.load(std::memory_order_acquire);
  const bool known = watch.polls.size() == count;
  bool all_poll = known;
  std::uint64_t steps = 0;
  const std::uint64_t enough = kPolls + 4ull * cluster.num_blocks * cluster.threads;
  for (std::size_t i = 0; i < count; ++i) {
    const bool done = workers[i].done.load(std::memory_order_acquire);
    const std::uint64_t polls = workers[i].polls.load(std::memory_order_acquire);
    steps += workers[i].steps.load(std::memory_order_relaxed);  // no older than the other two
    all_poll = all_poll && (done || polls - watch.polls[i] >= enough);
  }
  if (!known || steps != watch.steps) {
    watch.steps = steps;
    watch.since = now;
    watch.polls.clear();
    for (std::size_t i = 0; i < count; ++i) {
      watch.polls.push_back(workers[i].polls.load(std::memory_order_relaxed));
    }
    return;
  }
  if (!all_poll || now - watch.since < kShort || start_worker()) return;
  if (now - watch.since < std::chrono::duration<double>(launch->patience)) return;
  const std::string missing = missing_threads(cluster);
  fault((missing.empty() ? "" : missing + "\n") +
        "no progress: a thread polls, and no other thread writes what it waits for\n  " +
        name_of(me) + " " + where(me.call) + stuck_barriers(cluster));
}

bool Run::start_worker() {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::size_t count = started.load(std::memory_order_relaxed);
  if (count == workers.size() || next.load(std::memory_order_relaxed) >= clusters) return false;
  try {
    threads.emplace_back(work, std::ref(*this), std::ref(workers[count]));
  } catch (const std::system_error&) {
    return false;  // the OS refuses more threads
  }
  started.store(count + 1, std::memory_order_release);
  return true;
}

void fault(const std::string& text) {
  ClusterRunner& cluster = *current().block->cluster;
  cluster.run->record(text);
  abandon(cluster);
}

std::string where(const void* call) {
  const std::uintptr_t base = current().block->cluster->module->base;
  // `call` is a return address: the call instruction is before it.
  return format("{at %zx}", reinterpret_cast<std::uintptr_t>(call) - base - 1);
}

std::string name_of(const Fiber& fiber) {
  const uint3 b = fiber.block_index;
  const uint3 t = fiber.thread_index;
  return format("block (%u, %u, %u), thread (%u, %u, %u)", b.x, b.y, b.z, t.x, t.y, t.z);
}

std::string name_of_thread(const Run& run, std::uint64_t cluster, unsigned agent) {
  const std::uint32_t* const shape = run.launch->block;
  const unsigned threads = shape[0] * shape[1] * shape[2];
  const uint3 b = index_of_block(run, cluster, agent / threads);
  const unsigned t = agent % threads;
  return format("block (%u, %u, %u), thread (%u, %u, %u)", b.x, b.y, b.z, t % shape[0],
                t / shape[0] % shape[1], t / shape[0] / shape[1]);
}

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

void not_emulated(const char* instruction) {
  CUKIT_ENTER(me);
  fault(std::string("not emulated: ") + instruction + "\n  " + name_of(me) + " " + where(me.call));
}

void missing_instruction(const Fiber& me, Archs archs, const char* instruction) {
  const std::uint32_t arch = me.block->cluster->launch->arch;
  fault(format("missing instruction: sm_%u has no %s, which %s sm_%u%s\n  ", arch / 10, instruction,
               archs.last == archs.first ? "exists only on" : "exists from",
               archs.first / 10, archs.last == archs.first ? "a" : " on") +
        name_of(me) + " " + where(me.call));
}

void trap(const char* reason) {
  CUKIT_ENTER(me);
  fault(std::string("the kernel aborted: ") + reason + "\n  " + name_of(me) + " " + where(me.call));
}

// Returns 0, 1 with the report in launch->message, or 2 if Ctrl-C ended the launch.
extern "C" int cukit_emulator_launch(const Launch* launch) {
  Run run;
  run.launch = launch;
  run.interrupts_before = interrupts();
  std::pair<std::uintptr_t, Module> search{reinterpret_cast<std::uintptr_t>(launch->entry), {}};
  dl_iterate_phdr(find_module, &search);
  run.module = search.second;
  run.clusters = 1;
  for (int axis = 0; axis < 3; ++axis) {
    run.clusters_along[axis] = launch->grid[axis] / launch->cluster[axis];
    run.clusters *= run.clusters_along[axis];
  }
  const SignalHandlers handlers(launch->interruptible != 0);
  if (launch->checked && launch->global_races) run.global.watch(*launch, run.module);
  // Blocks that wait for other blocks need them to run concurrently, as on a GPU: there are up to
  // as many workers as clusters fit on a GPU with kSms SMs.
  constexpr std::uint64_t kSms = 132;
  constexpr std::uint64_t kThreads = 2048;  // of an SM
  const std::uint64_t threads = std::uint64_t{1} * launch->cluster[0] * launch->cluster[1] *
                                launch->cluster[2] * launch->block[0] * launch->block[1] *
                                launch->block[2];
  const std::uint64_t resident = std::max<std::uint64_t>(1, kSms * kThreads / threads);
  const std::uint64_t at_start = std::min<std::uint64_t>(launch->max_workers, run.clusters);
  run.workers = std::vector<Worker>(std::min(run.clusters, std::max(at_start, resident)));
  run.started.store(1);
  while (run.started.load() < at_start && run.start_worker()) {
  }
  work(run, run.workers[0]);
  run.join();
  if (run.interrupted()) return 2;
  const std::string late = run.failed() ? "" : run.guesses.remaining();
  if (!late.empty()) run.record(late);
  if (!run.failed()) return 0;
  std::snprintf(launch->message, launch->message_bytes, "%s", run.message.c_str());
  return 1;
}

extern "C" std::uint32_t cukit_emulator_launch_bytes() { return sizeof(Launch); }

}  // namespace cukit::emulator
