// Block barriers, and warp shuffles, votes, matches and reductions.
#pragma once

#include "common/emulator/third_party.h"
#include "common/emulator/memory.h"
#include "common/emulator/thread.h"

inline void __syncthreads(int line = __builtin_LINE()) {
  ::cukit::emulator::sync_block(::cukit::emulator::BlockVote::None, 0, line);
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return ::cukit::emulator::sync_block(::cukit::emulator::BlockVote::And, predicate, line);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return ::cukit::emulator::sync_block(::cukit::emulator::BlockVote::Or, predicate, line);
}
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return ::cukit::emulator::sync_block(::cukit::emulator::BlockVote::Count, predicate, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { ::cukit::emulator::sync_warp(mask); }

// CUDA may return any subset of the threads in the same branch. The emulator returns all of them,
// so that code that relies on full convergence works.
inline unsigned __activemask() { return ::cukit::emulator::converged_lanes(); }

namespace cukit::emulator {

template <typename T>
inline T shuffle(WarpOp op, unsigned mask, T value, unsigned argument, int width) {
  using B = typename Bits<sizeof(T)>::type;
  const std::uint64_t got =
      warp_collective(op, mask, bit_cast<B>(value), argument, static_cast<unsigned>(width));
  return bit_cast<T>(static_cast<B>(got));
}

inline unsigned vote(WarpOp op, unsigned mask, std::uint64_t value) {
  return static_cast<unsigned>(warp_collective(op, mask, value));
}

}  // namespace cukit::emulator

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return ::cukit::emulator::shuffle(::cukit::emulator::WarpOp::Shuffle, mask, value, lane, width);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ::cukit::emulator::shuffle(::cukit::emulator::WarpOp::ShuffleUp, mask, value, delta, width);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ::cukit::emulator::shuffle(::cukit::emulator::WarpOp::ShuffleDown, mask, value, delta,
                                    width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return ::cukit::emulator::shuffle(::cukit::emulator::WarpOp::ShuffleXor, mask, value, lane_mask,
                                    width);
}

inline int __any_sync(unsigned mask, int predicate) {
  return ::cukit::emulator::vote(::cukit::emulator::WarpOp::Any, mask, predicate != 0);
}
inline int __all_sync(unsigned mask, int predicate) {
  return ::cukit::emulator::vote(::cukit::emulator::WarpOp::All, mask, predicate != 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::cukit::emulator::vote(::cukit::emulator::WarpOp::Ballot, mask, predicate != 0);
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  using B = typename ::cukit::emulator::Bits<sizeof(T)>::type;
  return ::cukit::emulator::vote(::cukit::emulator::WarpOp::MatchAny, mask,
                                 ::cukit::emulator::bit_cast<B>(value));
}
template <typename T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all_equal) {
  using B = typename ::cukit::emulator::Bits<sizeof(T)>::type;
  const unsigned equal = ::cukit::emulator::vote(::cukit::emulator::WarpOp::MatchAll, mask,
                                                 ::cukit::emulator::bit_cast<B>(value));
  *all_equal = equal != 0;
  return equal;
}

#define CUKIT_WARP_REDUCE(name, T, op)                                                       \
  inline T name(unsigned mask, T value) {                                                    \
    return static_cast<T>(                                                                   \
        ::cukit::emulator::vote(::cukit::emulator::WarpOp::op, mask, static_cast<unsigned>(value))); \
  }
CUKIT_WARP_REDUCE(__reduce_add_sync, unsigned, AddU32)
CUKIT_WARP_REDUCE(__reduce_add_sync, int, AddU32)
CUKIT_WARP_REDUCE(__reduce_min_sync, unsigned, MinU32)
CUKIT_WARP_REDUCE(__reduce_min_sync, int, MinS32)
CUKIT_WARP_REDUCE(__reduce_max_sync, unsigned, MaxU32)
CUKIT_WARP_REDUCE(__reduce_max_sync, int, MaxS32)
CUKIT_WARP_REDUCE(__reduce_and_sync, unsigned, And)
CUKIT_WARP_REDUCE(__reduce_or_sync, unsigned, Or)
CUKIT_WARP_REDUCE(__reduce_xor_sync, unsigned, Xor)
#undef CUKIT_WARP_REDUCE
