// What a checked kernel calls: the compiler instruments every load and store as for its thread
// sanitizer, and pointers and array indices as for its undefined-behaviour sanitizer; the functions
// it then calls are these. No sanitizer runtime is linked or loaded.
#include <cstdint>

#include "block.h"
#include "common/emulator/memory.h"

namespace cukit::emulator {

void check_access(const void* pointer, std::size_t bytes, Access access) {
  CUKIT_ENTER(me);
  if (checked()) check(thread_actor(me), pointer, bytes, access);
}

namespace {

inline void judge(void* pointer, std::size_t bytes, Access access, const void* call) {
  if (cukit_emulator_thread == nullptr) return;
  Fiber& me = current();
  me.call = call;
  check(thread_actor(me), pointer, bytes, access);
}

}  // namespace

#define CUKIT_INSTRUMENT(name, bytes, access)                          \
  extern "C" void name(void* pointer) {                                \
    judge(pointer, bytes, Access::access, __builtin_return_address(0)); \
  }
CUKIT_INSTRUMENT(__tsan_read1, 1, Read)
CUKIT_INSTRUMENT(__tsan_read2, 2, Read)
CUKIT_INSTRUMENT(__tsan_read4, 4, Read)
CUKIT_INSTRUMENT(__tsan_read8, 8, Read)
CUKIT_INSTRUMENT(__tsan_read16, 16, Read)
CUKIT_INSTRUMENT(__tsan_write1, 1, Write)
CUKIT_INSTRUMENT(__tsan_write2, 2, Write)
CUKIT_INSTRUMENT(__tsan_write4, 4, Write)
CUKIT_INSTRUMENT(__tsan_write8, 8, Write)
CUKIT_INSTRUMENT(__tsan_write16, 16, Write)
CUKIT_INSTRUMENT(__tsan_unaligned_read2, 2, Read)
CUKIT_INSTRUMENT(__tsan_unaligned_read4, 4, Read)
CUKIT_INSTRUMENT(__tsan_unaligned_read8, 8, Read)
CUKIT_INSTRUMENT(__tsan_unaligned_read16, 16, Read)
CUKIT_INSTRUMENT(__tsan_unaligned_write2, 2, Write)
CUKIT_INSTRUMENT(__tsan_unaligned_write4, 4, Write)
CUKIT_INSTRUMENT(__tsan_unaligned_write8, 8, Write)
CUKIT_INSTRUMENT(__tsan_unaligned_write16, 16, Write)
#undef CUKIT_INSTRUMENT

extern "C" void __tsan_read_range(void* pointer, std::size_t bytes) {
  judge(pointer, bytes, Access::Read, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* pointer, std::size_t bytes) {
  judge(pointer, bytes, Access::Write, __builtin_return_address(0));
}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// What the compiler tells of a checked pointer or index (its layout is fixed by the sanitizers' ABI).
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
  fault(format("misaligned: %s of %s needs a multiple of %u bytes, the address is one of %zu\n  ",
               action, data->type->text, alignment, static_cast<std::size_t>(pointer & -pointer)) +
        name_of(me) + " " + where(me.call));
}

extern "C" void __ubsan_handle_out_of_bounds(IndexCheck* data, std::uintptr_t index) {
  CUKIT_ENTER(me);
  fault(format("out of bounds: index %zd of %s\n  ", static_cast<std::intptr_t>(index),
               data->array->text) +
        name_of(me) + " " + where(me.call));
}

// Atomics ------------------------------------------------------------------------------------------

namespace {

template <typename T>
std::uint64_t compare_exchange(void* to, std::uint64_t expected, std::uint64_t value) {
  T old = static_cast<T>(expected);
  __atomic_compare_exchange_n(static_cast<T*>(to), &old, static_cast<T>(value), false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}

// A thread that spins on an atomic must let the others run sooner or later.
void count_poll(Fiber& me) {
  if (++me.atomics % 1024 == 0) yield();
}

}  // namespace

std::uint64_t atomic_compare_exchange(void* to, std::uint64_t expected, std::uint64_t value,
                                      std::size_t bytes) {
  count_poll(current());
  switch (bytes) {
    case 2: return compare_exchange<std::uint16_t>(to, expected, value);
    case 4: return compare_exchange<std::uint32_t>(to, expected, value);
    default: return compare_exchange<std::uint64_t>(to, expected, value);
  }
}

std::uint64_t atomic_load(const void* from, std::size_t bytes) {
  switch (bytes) {
    case 2: return __atomic_load_n(static_cast<const std::uint16_t*>(from), __ATOMIC_SEQ_CST);
    case 4: return __atomic_load_n(static_cast<const std::uint32_t*>(from), __ATOMIC_SEQ_CST);
    default: return __atomic_load_n(static_cast<const std::uint64_t*>(from), __ATOMIC_SEQ_CST);
  }
}

// Shared addresses -----------------------------------------------------------------------------------

namespace {

// Static shared memory from 0 on, then dynamic, as on the GPU, where both fit in the 18 bits of a
// matrix descriptor. In a shared::cluster address the top byte is the block's rank plus one.
constexpr unsigned kRankShift = 24;
constexpr std::uint32_t kAlignment = 1024;

std::uint32_t first_dynamic(const Cluster& cluster) {
  const auto static_bytes = static_cast<std::uint32_t>(cluster.module->static_bytes);
  return (static_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::uint32_t shared_address(const void* pointer) {
  CUKIT_ENTER(me);
  Block& block = *me.block;
  const auto* at = static_cast<const unsigned char*>(pointer);
  const Launch& launch = *block.cluster->launch;
  // One past the end is an address too.
  if (at >= block.dynamic_shared && at <= block.dynamic_shared + launch.dynamic_bytes) {
    return first_dynamic(*block.cluster) + static_cast<std::uint32_t>(at - block.dynamic_shared);
  }
  const std::size_t static_bytes = block.cluster->module->static_bytes;
  if (static_bytes > 0 && at >= block.static_shared && at <= block.static_shared + static_bytes) {
    return static_cast<std::uint32_t>(at - block.static_shared);
  }
  fault("not in shared memory: __cvta_generic_to_shared of another pointer\n  " + name_of(me) + " " +
        where(me.call));
}

std::uint32_t map_to_rank(std::uint32_t address, unsigned rank) {
  CUKIT_ENTER(me);
  if (rank >= me.cluster_blocks) {
    fault(format("out of bounds: rank %u in a cluster of %u blocks\n  ", rank, me.cluster_blocks) +
          name_of(me) + " " + where(me.call));
  }
  return local_address(address) | (rank + 1) << kRankShift;
}

std::uint32_t local_address(std::uint32_t address) { return address & ((1u << kRankShift) - 1); }

Place place_of(const Fiber& me, std::uint32_t address, std::size_t bytes) {
  Cluster& cluster = *me.block->cluster;
  const unsigned tag = address >> kRankShift;
  Block& block = tag == 0 ? *me.block : *cluster.blocks[tag - 1];
  if (block.live == 0) {
    fault(format("the block of rank %u, whose shared memory this is, has exited\n  ", block.rank) +
          name_of(me) + " " + where(me.call));
  }
  const std::uint32_t at = local_address(address);
  const std::uint32_t dynamic = first_dynamic(cluster);
  const std::size_t dynamic_bytes = cluster.launch->dynamic_bytes;
  const std::size_t static_bytes = cluster.module->static_bytes;
  if (at >= dynamic && at - dynamic + bytes <= dynamic_bytes) {
    return {&block, block.dynamic_shared + (at - dynamic)};
  }
  if (at < dynamic && at + bytes <= static_bytes) {
    const bool here = cluster.num_blocks == 1 || cluster.resident == &block;
    return {&block, (here ? block.static_shared : block.static_copy.data()) + at};
  }
  fault(format("out of bounds: %zu bytes at byte %u of the %s shared memory of %zu bytes\n  ", bytes,
               at >= dynamic ? at - dynamic : at, at >= dynamic ? "dynamic" : "static",
               at >= dynamic ? dynamic_bytes : static_bytes) +
        name_of(me) + " " + where(me.call));
}

void* shared_pointer(std::uint32_t address, std::size_t bytes) {
  CUKIT_ENTER(me);
  return place_of(me, address, bytes).pointer;
}

}  // namespace cukit::emulator
