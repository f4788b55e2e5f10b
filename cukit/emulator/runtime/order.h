// The order that atomics, volatile accesses and fences make between threads.
//
// An atomic write, or a volatile one after a fence, publishes at its address what the thread's last fence
// has made visible; barriers hand that on to the other threads of the block. Whoever reads the address
// atomically or as volatile knows it from then on. A fence on the reader's side is not asked for.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "block.h"

namespace cukit::emulator {

// True if a fence of the thread, or of one that it has met at a barrier, came before.
inline bool publishes(const Fiber& me) {
  return me.seen->published_in_block != nullptr;
}
// To be called before the value is written, and after it has been read.
void publish(Fiber& me, const void* to);
void learn(Fiber& me, const void* from);

// What is done at the thread's next access or call: it learns from an address that it is about to read.
inline void learn_later(Fiber& me, const void* from) {
  me.deferred.learn_from = from;
  me.has_deferred = true;
}

// A thread that spins must let the others run sooner or later.
void count_poll(Fiber& me, const void* address);

}  // namespace cukit::emulator
