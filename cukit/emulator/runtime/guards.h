// Reports crashes and endless loops of kernels as faults, which end the launch.
#pragma once

#include <csignal>
#include <cstdint>
#include <ctime>
#include <memory>

#include "block.h"

namespace cukit::emulator {

// While an instance exists, crashes of kernels become faults and, if `interruptible`, Ctrl-C ends
// the launch. Signals to threads that run no kernel are passed to the handlers installed before.
class SignalHandlers {
 public:
  explicit SignalHandlers(bool interruptible);
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  bool interruptible_;
};

// The number of SIGINTs (Ctrl-C) received while an interruptible instance existed.
std::uint32_t interrupts();

// A worker's signal state: a stack for the handlers, since a fiber's own may be exhausted, and a
// timer that checks whether the kernel makes progress.
class WorkerGuard {
 public:
  explicit WorkerGuard(ClusterRunner& cluster);
  ~WorkerGuard();
  WorkerGuard(const WorkerGuard&) = delete;
  WorkerGuard& operator=(const WorkerGuard&) = delete;

  ClusterRunner& cluster() const { return cluster_; }
  unsigned char* stack_top() const { return stack_.get() + kStackBytes; }
  // To be called at every tick of the timer. Returns true if the worker must leave the kernel.
  bool overdue();
  // Schedules the next tick in a millisecond: the worker cannot be stopped outside the kernel's
  // code.
  void look_again_soon();

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;

  void set_timer(double first_seconds);

  ClusterRunner& cluster_;
  std::unique_ptr<unsigned char[]> stack_;
  stack_t stack_before_{};
  timer_t timer_{};
  bool has_timer_ = false;
  double tick_seconds_;
  unsigned idle_ticks_ = 0;
  std::uint64_t progress_seen_ = 0;
};

}  // namespace cukit::emulator
