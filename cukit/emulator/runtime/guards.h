// What would kill the process or keep it busy for ever ends the launch instead.
#pragma once

#include <csignal>
#include <cstdint>
#include <ctime>
#include <memory>

#include "block.h"

namespace cukit::emulator {

// While one of them lives, crashes of kernels become faults, and so does Ctrl-C if `interruptible`.
// Signals that come to threads which run no kernel go to the handlers that were there before.
class SignalHandlers {
 public:
  explicit SignalHandlers(bool interruptible);
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  bool interruptible_;
};

// Counts Ctrl-C.
std::uint32_t interrupts();

// What a worker needs for its signals: a stack for the handlers, since a fiber's own may have no room
// left, and a timer that looks whether the kernel still does anything.
class WorkerGuard {
 public:
  explicit WorkerGuard(Cluster& cluster);
  ~WorkerGuard();
  WorkerGuard(const WorkerGuard&) = delete;
  WorkerGuard& operator=(const WorkerGuard&) = delete;

  Cluster& cluster() const { return cluster_; }
  unsigned char* stack_top() const { return stack_.get() + kStackBytes; }
  // At every tick of the timer. True if the launch has to end where the worker is.
  bool overdue();
  // Looks again soon, when the worker may be where it can be stopped.
  void look_again_soon();

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;

  void set_timer(double first_seconds);

  Cluster& cluster_;
  std::unique_ptr<unsigned char[]> stack_;
  stack_t stack_before_{};
  timer_t timer_{};
  bool has_timer_ = false;
  double tick_seconds_;
  unsigned idle_ticks_ = 0;
  std::uint64_t progress_seen_ = 0;
};

}  // namespace cukit::emulator
