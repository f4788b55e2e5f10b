// The order that atomics, volatile accesses and fences establish between threads.
//
// An atomic write, or a volatile write after a fence, publishes at its address the accesses that
// the thread's last fence has made visible. After a barrier, atomic and volatile writes of the
// other threads of the block publish these accesses too. A thread that reads the address by an
// atomic or a volatile load is ordered after the published accesses, without a fence of its own.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "block.h"

namespace cukit::emulator {

// True if the thread, or a thread it has met at a barrier, has executed a fence.
inline bool publishes(const Fiber& me) {
  return me.seen->published_in_block != nullptr;
}
// publish: to be called before the value is written; acquire_published: after it has been read.
void publish(Fiber& me, const void* to);
void acquire_published(Fiber& me, const void* from);

// Defers acquire_published() to the thread's next access or call: the load has yet to execute.
inline void acquire_later(Fiber& me, const void* from) {
  me.deferred.acquire_address = from;
  me.has_deferred = true;
}

// Counts an atomic or a volatile load, which may be part of a spin loop; after a number of them,
// other threads run.
void count_poll(Fiber& me, const void* address);

}  // namespace cukit::emulator
