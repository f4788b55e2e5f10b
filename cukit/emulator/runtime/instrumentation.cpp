// The functions that a checked kernel calls. The compiler instruments every load and store as for
// its thread sanitizer, and pointers and array indices as for its undefined-behaviour sanitizer;
// the functions that it then calls are defined here. No sanitizer runtime is linked or loaded.
#include <cstdint>
#include <cstring>

#include "block.h"
#include "engines.h"
#include "order.h"
#include "quick.h"

namespace cukit::emulator {

void check_access(const void* pointer, std::size_t bytes, Access access) {
  CUKIT_ENTER(me);
  if (checked()) check(thread_actor(me), pointer, bytes, access);
}

namespace {

// Below the frame of this function the stack is unused, and above the kernel's frames is the Fiber,
// of which kernels may only read threadIdx and the like.
inline __attribute__((always_inline)) void check_stack(const Fiber& me, const void* pointer,
                                                       std::size_t bytes, Access access,
                                                       const void* frame) {
  const auto* const at = static_cast<const unsigned char*>(pointer);
  const bool above = access != Access::Read && at + bytes > reinterpret_cast<const unsigned char*>(&me);
  if (!above && pointer >= frame) return;
  fault(format("out of bounds: %s of %zu bytes outside of the thread's local variables\n  ",
               access == Access::Read ? "read" : "write", bytes) +
        name_of(me) + " " + where(me.call));
}

inline __attribute__((always_inline)) void check_plain(void* pointer, std::size_t bytes,
                                                       Access access, const void* call) {
  if (cukit_emulator_thread == nullptr || bytes == 0) return;
  Fiber& me = current();
  run_deferred(me);
  me.call = call;
  if (on_stack(me, pointer)) {
    check_stack(me, pointer, bytes, access, __builtin_frame_address(0));
    touch(me, pointer, bytes, access);
  } else if (!quick(me, pointer, bytes, access == Access::Write)) {
    check(thread_actor(me), pointer, bytes, access);
  }
}

// Volatile: a load may observe what another thread publishes, and a store after a fence publishes.
inline __attribute__((always_inline)) void check_volatile(void* pointer, std::size_t bytes,
                                                          Access access, const void* call) {
  if (cukit_emulator_thread == nullptr) return;
  Fiber& me = current();
  run_deferred(me);
  me.call = call;
  if (on_stack(me, pointer)) {
    check_stack(me, pointer, bytes, access, __builtin_frame_address(0));
    touch(me, pointer, bytes, access);
  } else if (access == Access::Read) {
    count_poll(me, pointer);
    check(thread_actor(me), pointer, bytes, Access::StrongRead);
    acquire_later(me, pointer);
  } else {
    // The first store to shared memory initialises it, whatever its kind.
    const bool strong = publishes(me) && !uninitialised(*me.block, pointer);
    check(thread_actor(me), pointer, bytes, strong ? Access::Atomic : Access::Write);
    publish(me, pointer);
  }
}

[[noreturn]] __attribute__((cold, noinline)) void misaligned(const void* pointer, std::size_t bytes,
                                                             Access access, const void* call) {
  Fiber& me = current();
  me.call = call;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  fault(format("misaligned: %s of %zu bytes needs %zu-byte alignment, the address has %zu-byte "
               "alignment\n  ", access == Access::Read ? "load" : "store", bytes, bytes,
               static_cast<std::size_t>(address & -address)) +
        name_of(me) + " " + where(call));
}

// For accesses that the compiler assumes to be aligned to their size. Local variables are exempt: the
// compiler chooses their alignment.
inline __attribute__((always_inline)) void check_aligned(void* pointer, std::size_t bytes,
                                                         Access access, const void* call) {
  if (__builtin_expect(reinterpret_cast<std::uintptr_t>(pointer) % bytes != 0, false) &&
      cukit_emulator_thread != nullptr && !on_stack(current(), pointer)) {
    misaligned(pointer, bytes, access, call);
  }
  check_plain(pointer, bytes, access, call);
}

}  // namespace

#define CUKIT_INSTRUMENT(name, bytes, checker)                           \
  extern "C" void __tsan_##name##read##bytes(void* pointer) {            \
    checker(pointer, bytes, Access::Read, __builtin_return_address(0));  \
  }                                                                      \
  extern "C" void __tsan_##name##write##bytes(void* pointer) {           \
    checker(pointer, bytes, Access::Write, __builtin_return_address(0)); \
  }
CUKIT_INSTRUMENT(, 1, check_plain)
CUKIT_INSTRUMENT(, 2, check_aligned)
CUKIT_INSTRUMENT(, 4, check_aligned)
CUKIT_INSTRUMENT(, 8, check_aligned)
CUKIT_INSTRUMENT(, 16, check_aligned)
CUKIT_INSTRUMENT(unaligned_, 2, check_plain)
CUKIT_INSTRUMENT(unaligned_, 4, check_plain)
CUKIT_INSTRUMENT(unaligned_, 8, check_plain)
CUKIT_INSTRUMENT(unaligned_, 16, check_plain)
#undef CUKIT_INSTRUMENT

#define CUKIT_INSTRUMENT_VOLATILE(bytes)                                        \
  extern "C" void __tsan_volatile_read##bytes(void* pointer) {                  \
    check_volatile(pointer, bytes, Access::Read, __builtin_return_address(0));  \
  }                                                                             \
  extern "C" void __tsan_volatile_write##bytes(void* pointer) {                 \
    check_volatile(pointer, bytes, Access::Write, __builtin_return_address(0)); \
  }
CUKIT_INSTRUMENT_VOLATILE(1)
CUKIT_INSTRUMENT_VOLATILE(2)
CUKIT_INSTRUMENT_VOLATILE(4)
CUKIT_INSTRUMENT_VOLATILE(8)
CUKIT_INSTRUMENT_VOLATILE(16)
#undef CUKIT_INSTRUMENT_VOLATILE

extern "C" void __tsan_read_range(void* pointer, std::size_t bytes) {
  check_plain(pointer, bytes, Access::Read, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* pointer, std::size_t bytes) {
  check_plain(pointer, bytes, Access::Write, __builtin_return_address(0));
}
// Calls that the kernel makes (toolchain.py has the linker rename them) and, under the thread
// sanitizer's names, those that clang makes to copy structures.
extern "C" void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  check_plain(const_cast<void*>(from), bytes, Access::Read, __builtin_return_address(0));
  check_plain(to, bytes, Access::Write, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
extern "C" void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  check_plain(const_cast<void*>(from), bytes, Access::Read, __builtin_return_address(0));
  check_plain(to, bytes, Access::Write, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
extern "C" void* __wrap_memset(void* to, int value, std::size_t bytes) {
  // On the stack, the compiler may have added the call to fill a variable without an initialiser, which
  // is not an access.
  if (cukit_emulator_thread == nullptr || !on_stack(current(), to)) {
    check_plain(to, bytes, Access::Write, __builtin_return_address(0));
  }
  return std::memset(to, value, bytes);
}
extern "C" __attribute__((alias("__wrap_memcpy"))) void* __tsan_memcpy(void*, const void*, std::size_t);
extern "C" __attribute__((alias("__wrap_memmove"))) void* __tsan_memmove(void*, const void*, std::size_t);
extern "C" __attribute__((alias("__wrap_memset"))) void* __tsan_memset(void*, int, std::size_t);

extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_atomic_thread_fence(int order) { __atomic_thread_fence(order); }

// The compiler's description of a checked pointer or index (the sanitizers' ABI fixes its layout).
struct SourcePlace {
  const char* file;
  std::uint32_t line, column;
};
struct TypeName {
  std::uint16_t kind, information;
  char text[1];
};
struct PointerCheck {
  SourcePlace place;
  const TypeName* type;
  unsigned char log_alignment;
  unsigned char kind;
};
struct IndexCheck {
  SourcePlace place;
  const TypeName* array;
  const TypeName* index;
};

extern "C" void __ubsan_handle_type_mismatch_v1(PointerCheck* data, std::uintptr_t pointer) {
  CUKIT_ENTER(me);
  const unsigned alignment = 1u << data->log_alignment;
  const char* action = data->kind == 0 ? "load" : data->kind == 1 ? "store" : "access";
  if (pointer == 0) {
    fault(format("null pointer: %s of %s\n  ", action, data->type->text) + name_of(me) + " " +
          where(me.call));
  }
  if (pointer % alignment == 0) {
    fault(format("out of bounds: %s of %s outside of the variable that the pointer points into\n  ",
                 action, data->type->text) + name_of(me) + " " + where(me.call));
  }
  fault(format("misaligned: %s of %s needs %u-byte alignment, the address has %zu-byte "
               "alignment\n  ", action, data->type->text, alignment,
               static_cast<std::size_t>(pointer & -pointer)) +
        name_of(me) + " " + where(me.call));
}

extern "C" void __ubsan_handle_out_of_bounds(IndexCheck* data, std::uintptr_t index) {
  CUKIT_ENTER(me);
  fault(format("out of bounds: index %zd of %s\n  ", static_cast<std::intptr_t>(index),
               data->array->text) +
        name_of(me) + " " + where(me.call));
}

extern "C" void __ubsan_handle_divrem_overflow(SourcePlace*, std::uintptr_t, std::uintptr_t) {
  CUKIT_ENTER(me);
  fault("integer division by zero\n  " + name_of(me) + " " + where(me.call));
}

extern "C" void __ubsan_handle_missing_return(SourcePlace*) {
  CUKIT_ENTER(me);
  fault("a function that returns a value ends without return\n  " + name_of(me) + " " +
        where(me.call));
}

extern "C" void __ubsan_handle_builtin_unreachable(SourcePlace*) {
  CUKIT_ENTER(me);
  fault("__builtin_unreachable is reached\n  " + name_of(me) + " " + where(me.call));
}

}  // namespace cukit::emulator
