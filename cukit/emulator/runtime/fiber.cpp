#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

// Saves the callee-saved registers of each ABI, except the control words mxcsr, x87 and fpcr, which
// are the same in all fibers.
#if defined(__x86_64__)

asm(R"(
.text
.globl cukit_emulator_switch
.type cukit_emulator_switch, @function
cukit_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cukit_emulator_switch, . - cukit_emulator_switch
)");

#elif defined(__aarch64__)

asm(R"(
.text
.globl cukit_emulator_switch
.type cukit_emulator_switch, %function
cukit_emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cukit_emulator_switch, . - cukit_emulator_switch
)");

#else
#error "the emulator supports x86-64 and aarch64 only"
#endif

namespace cukit::emulator {

namespace {
constexpr std::size_t kMapped = Stack::kGuardBytes + Stack::kSpreadBytes + Stack::kBytes;
}

Stack::Stack(std::size_t number) {
  constexpr std::size_t kStep = 320;  // five cache lines
  void* mapping = mmap(nullptr, kMapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<unsigned char*>(mapping);
  low_ = mapping_ + kGuardBytes + number * kStep % kSpreadBytes;
  mprotect(mapping_, kGuardBytes, PROT_NONE);
}

Stack::~Stack() { munmap(mapping_, kMapped); }

void* prepare_stack(unsigned char* top, void (*start)()) {
  auto* slot = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{15});
#if defined(__x86_64__)
  *--slot = 0;  // where `start` would return to: the end of every backtrace
  *--slot = reinterpret_cast<std::uintptr_t>(start);
  for (int i = 0; i < 6; ++i) *--slot = 0;
#else
  for (int i = 0; i < 20; ++i) *--slot = 0;
  slot[11] = reinterpret_cast<std::uintptr_t>(start);  // x30
#endif
  return slot;
}

}  // namespace cukit::emulator
