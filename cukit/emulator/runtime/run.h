// A launch in progress: the clusters not yet run, and the first fault that any worker found.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "block.h"
#include "guards.h"
#include "global_shadow.h"
#include "guesses.h"

namespace cukit::emulator {

// A worker's progress, read by the threads that poll in other workers.
struct alignas(64) Worker {
  std::atomic<std::uint64_t> steps{0};  // ClusterRunner::steps at its last poll
  std::atomic<std::uint64_t> polls{0};
  std::atomic<bool> done{false};        // it has no cluster left to run
};

// What atomics have published in global memory, by address.
struct PublishedStripe {
  std::mutex mutex;
  std::unordered_map<std::uintptr_t, Published> places;
};
constexpr std::size_t kPublishedStripes = 64;

struct Run {
  const Launch* launch;
  Module module;
  std::uint64_t clusters;
  std::uint64_t clusters_along[3];
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> faulty{false};
  std::vector<Worker> workers;          // one for each worker that may run
  std::atomic<std::size_t> started{0};  // number of workers started
  std::vector<std::thread> threads;     // of the workers other than the first
  std::atomic<bool> any_published{false};
  PublishedStripe published[kPublishedStripes];
  GlobalShadow global;
  Guesses guesses;
  std::mutex mutex;
  std::uint32_t interrupts_before;
  std::string message;

  // Starts one more worker. False if all are started or no cluster is left to run.
  bool start_worker();
  void join();

  bool failed() const { return faulty.load(std::memory_order_relaxed); }
  bool interrupted() const {
    return launch->interruptible != 0 && interrupts() != interrupts_before;
  }
  // Whether workers should stop.
  bool stopped() const { return failed() || interrupted(); }
  void record(const std::string& text);
  // Counts a poll. Ends the launch once all workers have done nothing but poll for `patience`
  // seconds.
  void check_patience(Fiber& me);
};

// Runs clusters until none is left, or any worker finds a fault.
void work(Run& run, Worker& worker);

std::size_t fiber_bytes();
// The fiber at the top of a stack.
Fiber& fiber_of(const Stack& stack);
void prepare_shared(Block& block, unsigned rank);
// The index of the block of this rank in a cluster.
uint3 index_of_block(const Run& run, std::uint64_t cluster, unsigned rank);

}  // namespace cukit::emulator
