#include "guards.h"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "run.h"

// glibc's headers define this name since 2.38.
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace cukit::emulator {

namespace {

constexpr int kCrashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
// Ignored by default, so a signal that arrives late is harmless.
constexpr int kTick = SIGURG;

// Why a worker leaves the kernel; filled in by a handler, read once the worker is on another stack.
struct Reason {
  int signal;
  int code;
  std::uintptr_t address;
  std::uintptr_t pc;
};

#define CUKIT_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) __thread
CUKIT_THREAD_LOCAL WorkerGuard* worker;
CUKIT_THREAD_LOCAL Reason reason;
CUKIT_THREAD_LOCAL bool leaving;
#undef CUKIT_THREAD_LOCAL

std::atomic<std::uint32_t> interrupt_count{0};

std::mutex handlers_mutex;
unsigned users = 0;
unsigned interruptible_users = 0;
struct sigaction before[NSIG];

void pass_on(int signal, siginfo_t* info, void* context) {
  const struct sigaction& old = before[signal];
  if ((old.sa_flags & SA_SIGINFO) != 0) {
    old.sa_sigaction(signal, info, context);
  } else if (old.sa_handler == SIG_DFL) {
    if (signal == kTick) return;  // the default action is none
    sigaction(signal, &old, nullptr);  // the instruction faults again, which ends the process
  } else if (old.sa_handler != SIG_IGN) {
    old.sa_handler(signal);
  }
}

std::uintptr_t pc_of(const ucontext_t& context) {
#if defined(__x86_64__)
  return static_cast<std::uintptr_t>(context.uc_mcontext.gregs[REG_RIP]);
#else
  return static_cast<std::uintptr_t>(context.uc_mcontext.pc);
#endif
}

bool in_kernel(const ClusterRunner& cluster, std::uintptr_t pc) {
  return pc >= cluster.module->base && pc < cluster.module->end;
}

std::string describe(const Fiber& me) {
  const ClusterRunner& cluster = *me.block->cluster;
  const auto low = reinterpret_cast<std::uintptr_t>(me.stack_low);
  const bool has_address = reason.code != SI_KERNEL && reason.code > 0;
  switch (reason.signal) {
    case SIGSEGV:
    case SIGBUS:
      if (has_address && reason.address < low && reason.address >= low - Stack::kGuardBytes - Stack::kSpreadBytes) {
        return format("stack overflow: the thread's local variables and calls need more than %zu KiB",
                      Stack::kBytes / 1024);
      }
      if (has_address && reason.address < kNullBytes) {
        return format("null pointer: access to address 0x%zx", reason.address);
      }
      return "wild pointer: access " +
             (has_address ? "at global memory " + describe_outside(*cluster.launch, reason.address)
                          : std::string("to a non-canonical address"));
    case SIGFPE: return "integer division by zero, or of the smallest integer by -1";
    case SIGILL: return "the kernel aborted: an illegal instruction, such as __builtin_trap";
    case SIGABRT: return "the kernel aborted: abort(), or an exception that is not caught";
    default:
      return format("no progress: a thread has computed for %g seconds, and no thread of its "
                    "cluster has written memory, ended a wait or exited; is it an endless loop?",
                    cluster.launch->patience);
  }
}

// Entered from a handler, on the guard's stack: reports and leaves the kernel.
[[noreturn]] void leave_kernel() {
  Fiber& me = current();
  ClusterRunner& cluster = *me.block->cluster;
  if (reason.signal == kTick && cluster.run->stopped()) abandon(cluster);
  // In code outside the kernel's library, the best known place is the kernel's last call to the
  // emulator.
  const void* call = me.call;
  if (in_kernel(cluster, reason.pc)) call = reinterpret_cast<const void*>(reason.pc + 1);
  std::string text = describe(me) + "\n  " + name_of(me);
  if (call != nullptr) text += " " + where(call);
  if (reason.signal == kTick) text += waiting_threads(cluster);
  fault(text);
}

void divert(const siginfo_t& info, ucontext_t& context) {
  leaving = true;
  reason = {info.si_signo, info.si_code, reinterpret_cast<std::uintptr_t>(info.si_addr),
            pc_of(context)};
  const auto top = reinterpret_cast<std::uintptr_t>(worker->stack_top()) & ~std::uintptr_t{15};
  const auto start = reinterpret_cast<std::uintptr_t>(&leave_kernel);
#if defined(__x86_64__)
  constexpr greg_t kDirectionFlag = 0x400;
  context.uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(start);
  context.uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(top - 8);  // as after a call
  context.uc_mcontext.gregs[REG_EFL] &= ~kDirectionFlag;
#else
  context.uc_mcontext.pc = start;
  context.uc_mcontext.sp = top;
#endif
}

void on_crash(int signal, siginfo_t* info, void* context) {
  if (worker == nullptr || cukit_emulator_thread == nullptr || leaving) {
    pass_on(signal, info, context);
    return;
  }
  divert(*info, *static_cast<ucontext_t*>(context));
}

void on_tick(int signal, siginfo_t* info, void* context) {
  if (worker == nullptr || info->si_code != SI_TIMER) {
    pass_on(signal, info, context);
    return;
  }
  if (cukit_emulator_thread == nullptr || leaving || !worker->overdue()) return;
  auto& interrupted = *static_cast<ucontext_t*>(context);
  // The emulator's own code and libraries may hold a lock.
  if (in_kernel(worker->cluster(), pc_of(interrupted))) {
    divert(*info, interrupted);
  } else {
    worker->look_again_soon();
  }
}

void on_interrupt(int signal, siginfo_t* info, void* context) {
  interrupt_count.fetch_add(1, std::memory_order_relaxed);
  pass_on(signal, info, context);
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, &before[signal]);
}

void put_back(int signal) { sigaction(signal, &before[signal], nullptr); }

}  // namespace

SignalHandlers::SignalHandlers(bool interruptible) : interruptible_(interruptible) {
  const std::lock_guard<std::mutex> lock(handlers_mutex);
  if (users++ == 0) {
    for (const int signal : kCrashes) handle(signal, on_crash);
    handle(kTick, on_tick);
  }
  if (interruptible_ && interruptible_users++ == 0) handle(SIGINT, on_interrupt);
}

SignalHandlers::~SignalHandlers() {
  const std::lock_guard<std::mutex> lock(handlers_mutex);
  if (interruptible_ && --interruptible_users == 0) put_back(SIGINT);
  if (--users == 0) {
    for (const int signal : kCrashes) put_back(signal);
    put_back(kTick);
  }
}

std::uint32_t interrupts() { return interrupt_count.load(std::memory_order_relaxed); }

WorkerGuard::WorkerGuard(ClusterRunner& cluster)
    : cluster_(cluster),
      stack_(new unsigned char[kStackBytes]),
      tick_seconds_(std::min(0.05, cluster.launch->patience / 4)) {
  stack_t stack{};
  stack.ss_sp = stack_.get();
  stack.ss_size = kStackBytes;
  sigaltstack(&stack, &stack_before_);
  worker = this;
  leaving = false;
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kTick;
  event.sigev_notify_thread_id = static_cast<int>(syscall(SYS_gettid));
  // CPU time of this thread: neither a busy machine nor a debugger makes it overdue.
  has_timer_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
  set_timer(tick_seconds_);
}

WorkerGuard::~WorkerGuard() {
  if (has_timer_) timer_delete(timer_);
  worker = nullptr;
  sigaltstack(&stack_before_, nullptr);
}

void WorkerGuard::set_timer(double first_seconds) {
  if (!has_timer_) return;
  const auto time = [](double seconds) {
    const auto nanoseconds = static_cast<long>(seconds * 1e9);
    return timespec{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  };
  const itimerspec period{time(tick_seconds_), time(first_seconds)};
  timer_settime(timer_, 0, &period, nullptr);
}

void WorkerGuard::look_again_soon() { set_timer(0.001); }

bool WorkerGuard::overdue() {
  if (cluster_.run->stopped()) return true;
  // Polling threads are timed by Run::check_patience.
  const std::uint64_t progress =
      cluster_.steps + cluster_.worker->polls.load(std::memory_order_relaxed);
  if (progress != progress_seen_) {
    progress_seen_ = progress;
    idle_ticks_ = 0;
    return false;
  }
  return ++idle_ticks_ * tick_seconds_ > cluster_.launch->patience;
}

}  // namespace cukit::emulator
