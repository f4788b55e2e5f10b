// State of the running CUDA thread, and the calls into the emulator's runtime.
//
// A CUDA thread is a fiber. The runtime (cukit/emulator/runtime) switches between the fibers of a
// block only at barriers, warp collectives and waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector_types.h"

namespace cukit::emulator {

struct Thread {
  uint3 thread_index;
  uint3 block_index;
  dim3 block_dim;
  dim3 grid_dim;
  unsigned lane;
  unsigned cluster_rank;
  unsigned cluster_blocks;
  unsigned char* dynamic_shared;
};

}  // namespace cukit::emulator

// The running thread, set at every switch. A block, or a cluster of blocks, stays on one
// operating-system thread.
extern "C" __attribute__((tls_model("initial-exec"))) __thread cukit::emulator::Thread*
    cukit_emulator_thread;

namespace cukit::emulator {

// A thread's own indices never change and are private, so that their accesses need no
// instrumentation, and the compiler may cache them across barriers.
#if defined(__x86_64__) && defined(__OPTIMIZE__)
__attribute__((always_inline)) inline const void* self() {
  const void* me;
  __asm__("movq cukit_emulator_thread@gottpoff(%%rip), %0\n\tmovq %%fs:(%0), %0" : "=r"(me));
  return me;
}
template <std::size_t Offset>
__attribute__((always_inline)) inline unsigned word_of_self() {
  unsigned value;
  __asm__("movl %c2(%1), %0" : "=r"(value) : "r"(self()), "i"(Offset));
  return value;
}
template <typename T, std::size_t Offset>
__attribute__((always_inline)) inline T three_of_self() {
  return {word_of_self<Offset>(), word_of_self<Offset + 4>(), word_of_self<Offset + 8>()};
}
__attribute__((always_inline)) inline unsigned char* dynamic_shared_memory() {
  unsigned char* memory;
  __asm__("movq %c2(%1), %0" : "=r"(memory) : "r"(self()), "i"(offsetof(Thread, dynamic_shared)));
  return memory;
}
#define CUKIT_OF_SELF(member) \
  (::cukit::emulator::word_of_self<offsetof(::cukit::emulator::Thread, member)>())
#define CUKIT_THREE_OF_SELF(type, member) \
  (::cukit::emulator::three_of_self<type, offsetof(::cukit::emulator::Thread, member)>())
#else
inline unsigned char* dynamic_shared_memory() { return cukit_emulator_thread->dynamic_shared; }
#define CUKIT_OF_SELF(member) (cukit_emulator_thread->member)
#define CUKIT_THREE_OF_SELF(type, member) (cukit_emulator_thread->member)
#endif

// Ends the launch with an error that names the instruction.
[[noreturn]] void not_emulated(const char* instruction);
// Ends the launch because of a kernel's assert or __trap.
[[noreturn]] void trap(const char* reason);

// Barriers ----------------------------------------------------------------------------------------

enum class BlockVote { None, And, Or, Count };

// __syncthreads and its voting forms; `line` identifies the call, which all threads of a warp must
// share.
int sync_block(BlockVote vote, int predicate, int line);
// bar.sync and bar.arrive on a named barrier; `threads` 0 means the full block.
void sync_named(unsigned barrier, unsigned threads);
void arrive_named(unsigned barrier, unsigned threads);
void cluster_arrive();
void cluster_wait();
void sync_warp(unsigned mask);

// Lets other threads run: in __nanosleep and in loops that poll.
void yield();

// Warp collectives: every lane in the mask passes 64 bits and receives 64 bits -----------

enum class WarpOp : unsigned {
  Shuffle, ShuffleUp, ShuffleDown, ShuffleXor,
  Any, All, Ballot, MatchAny, MatchAll,
  AddU32, MinU32, MaxU32, MinS32, MaxS32, And, Or, Xor,
};

// `argument`: source lane, delta or lane mask of a shuffle; `width`: its segment width.
std::uint64_t warp_collective(WarpOp op, unsigned mask, std::uint64_t value, unsigned argument = 0,
                              unsigned width = 32);

// Shared memory has 32-bit addresses, as on the GPU -----------------------------------------------

std::uint32_t shared_address(const void* pointer);
// mapa: the address in block `rank` that corresponds to an address in this block.
std::uint32_t map_to_rank(std::uint32_t address, unsigned rank);

// Accesses without compiler instrumentation -------------------------------------------------------

// Strong accesses are volatile and atomic loads: they do not race with atomics and strong stores.
// Block atomics are atomic only for the threads of the block.
enum class Access { Read, Write, Atomic, StrongRead, BlockAtomic };

// Performs the checks of instrumented loads and stores in a checked build.
void check_access(const void* pointer, std::size_t bytes, Access access);

enum class FenceScope { Block, Device };

// __threadfence and __threadfence_block.
void fence(FenceScope scope);

// Ends the launch unless `pointer` is a multiple of `alignment`.
void check_alignment(const void* pointer, std::size_t alignment, const char* what);

}  // namespace cukit::emulator
