// Replaces CUDA's cooperative groups: blocks, tiles, coalesced threads, clusters and the grid.
//
// Tiles are lane masks, and their collectives are those of the warp. Tiles larger than a warp and
// multi-device grids are not supported. `coalesced_threads` returns the threads of `__activemask`.
#pragma once

#include "common/emulator/language.h"

namespace cooperative_groups {

namespace detail {
inline unsigned thread_rank() { return ::cukit::emulator::ptx::thread_number(); }
inline unsigned block_threads() { return ::cukit::emulator::ptx::block_threads(); }
inline unsigned block_rank() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }
inline unsigned blocks() { return gridDim.x * gridDim.y * gridDim.z; }
}  // namespace detail

class thread_block {
 public:
  static void sync(int line = __builtin_LINE()) { __syncthreads(line); }
  struct arrival_token {};
  arrival_token barrier_arrive() const { return {}; }
  void barrier_wait(arrival_token&&, int line = __builtin_LINE()) const { __syncthreads(line); }
  static unsigned thread_rank() { return detail::thread_rank(); }
  static unsigned size() { return detail::block_threads(); }
  static unsigned num_threads() { return size(); }
  static dim3 group_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
  static dim3 thread_index() { return dim3(threadIdx.x, threadIdx.y, threadIdx.z); }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

class grid_group {
 public:
  bool is_valid() const { return CUKIT_OF_SELF(cluster_blocks) == detail::blocks(); }
  void sync() const {
    if (detail::blocks() == 1) return __syncthreads();
    if (!is_valid()) {
      ::cukit::emulator::not_emulated(
          "grid.sync() of more than 255 blocks or 32768 threads: launch a smaller grid");
    }
    ::cukit::emulator::cluster_arrive();
    ::cukit::emulator::cluster_wait();
  }
  struct arrival_token {};
  arrival_token barrier_arrive() const { return ::cukit::emulator::cluster_arrive(), arrival_token{}; }
  void barrier_wait(arrival_token&&) const { ::cukit::emulator::cluster_wait(); }
  unsigned long long thread_rank() const {
    return static_cast<unsigned long long>(detail::block_rank()) * detail::block_threads() +
           detail::thread_rank();
  }
  unsigned long long size() const {
    return static_cast<unsigned long long>(detail::blocks()) * detail::block_threads();
  }
  unsigned long long num_threads() const { return size(); }
  unsigned long long block_rank() const { return detail::block_rank(); }
  unsigned long long num_blocks() const { return detail::blocks(); }
  dim3 group_dim() const { return gridDim; }
  dim3 dim_blocks() const { return gridDim; }
  dim3 block_index() const { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
};
inline grid_group this_grid() { return {}; }

class cluster_group {
 public:
  struct arrival_token {};
  static void sync() { ::cukit::emulator::cluster_arrive(), ::cukit::emulator::cluster_wait(); }
  static arrival_token barrier_arrive() { return ::cukit::emulator::cluster_arrive(), arrival_token{}; }
  static void barrier_wait() { ::cukit::emulator::cluster_wait(); }
  static void barrier_wait(arrival_token&&) { ::cukit::emulator::cluster_wait(); }
  static unsigned block_rank() { return CUKIT_OF_SELF(cluster_rank); }
  static unsigned num_blocks() { return CUKIT_OF_SELF(cluster_blocks); }
  static unsigned thread_rank() { return block_rank() * detail::block_threads() + detail::thread_rank(); }
  static unsigned num_threads() { return num_blocks() * detail::block_threads(); }
  template <typename T>
  static T* map_shared_rank(T*, int) {
    ::cukit::emulator::not_emulated("map_shared_rank: pointers into another block's shared memory");
  }
};
inline cluster_group this_cluster() { return {}; }

namespace detail {

// Collectives of the lanes in a mask; ranks are in ascending lane order.
class Lanes {
 public:
  explicit Lanes(unsigned mask) : mask_(mask) {}

  void sync() const { __syncwarp(mask_); }
  unsigned thread_rank() const { return __popc(mask_ & ((1u << CUKIT_OF_SELF(lane)) - 1)); }
  unsigned size() const { return __popc(mask_); }
  unsigned num_threads() const { return size(); }
  int any(int predicate) const { return __any_sync(mask_, predicate); }
  int all(int predicate) const { return __all_sync(mask_, predicate); }
  unsigned ballot(int predicate) const { return packed(__ballot_sync(mask_, predicate)); }
  template <typename T>
  unsigned match_any(T value) const { return packed(__match_any_sync(mask_, value)); }
  template <typename T>
  unsigned match_all(T value, int& predicate) const {
    return packed(__match_all_sync(mask_, value, &predicate));
  }
  template <typename T>
  T shfl(T value, int rank) const {
    return words(value, [&](auto word) { return __shfl_sync(mask_, word, lane_of(rank)); });
  }
  template <typename T>
  T shfl_down(T value, unsigned delta) const {
    const unsigned to = thread_rank() + delta;
    return shfl(value, to < size() ? to : thread_rank());
  }
  template <typename T>
  T shfl_up(T value, unsigned delta) const {
    return shfl(value, delta <= thread_rank() ? thread_rank() - delta : thread_rank());
  }
  template <typename T>
  T shfl_xor(T value, unsigned mask) const {
    const unsigned to = thread_rank() ^ mask;
    return shfl(value, to < size() ? to : thread_rank());
  }
  unsigned lanes() const { return mask_; }

 protected:
  // Calls move() on a value of any size, four bytes at a time.
  template <typename T, typename Move>
  static T words(const T& value, const Move& move) {
    if constexpr (sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0) {
      return move(value);
    } else {
      static_assert(sizeof(T) % 4 == 0, "values of a multiple of four bytes are shuffled");
      unsigned parts[sizeof(T) / 4];
      memcpy(parts, &value, sizeof(T));
      for (unsigned& part : parts) part = move(part);
      T result;
      memcpy(&result, parts, sizeof(T));
      return result;
    }
  }
  int lane_of(unsigned rank) const {
    unsigned left = mask_;
    for (; rank > 0 && (left & (left - 1)) != 0; --rank) left &= left - 1;
    return __ffs(left) - 1;
  }
  // The bits of the group's lanes, compacted.
  unsigned packed(unsigned bits) const {
    unsigned result = 0, rank = 0;
    for (unsigned left = mask_; left != 0; left &= left - 1, ++rank) {
      result |= (bits >> (__ffs(left) - 1) & 1u) << rank;
    }
    return result;
  }
  unsigned mask_;
};

inline unsigned tile_mask(unsigned size) {
  const unsigned first = CUKIT_OF_SELF(lane) / size * size;
  return (size == 32 ? ~0u : (1u << size) - 1) << first;
}

}  // namespace detail

class coalesced_group : public detail::Lanes {
 public:
  explicit coalesced_group(unsigned mask) : Lanes(mask) {}
  unsigned meta_group_rank() const { return 0; }
  unsigned meta_group_size() const { return 1; }
};
inline coalesced_group coalesced_threads() { return coalesced_group(__activemask()); }

template <unsigned Size, typename Parent = void>
class thread_block_tile : public detail::Lanes {
  static_assert(Size <= 32 && (Size & (Size - 1)) == 0, "tiles of a power of two up to 32 threads");

 public:
  thread_block_tile() : Lanes(detail::tile_mask(Size)) {}
  thread_block_tile(const thread_block_tile<Size>&) : thread_block_tile() {}
  template <typename Other>
  thread_block_tile(const thread_block_tile<Size, Other>&) : thread_block_tile() {}
  static constexpr unsigned size() { return Size; }
  static constexpr unsigned num_threads() { return Size; }
  static unsigned thread_rank() { return CUKIT_OF_SELF(lane) % Size; }
  unsigned meta_group_rank() const { return detail::thread_rank() / Size; }
  unsigned meta_group_size() const { return (detail::block_threads() + Size - 1) / Size; }
  template <typename T>
  T shfl(T value, int rank) const {
    return words(value, [&](auto word) { return __shfl_sync(mask_, word, rank, Size); });
  }
  template <typename T>
  T shfl_down(T value, unsigned delta) const {
    return words(value, [&](auto word) { return __shfl_down_sync(mask_, word, delta, Size); });
  }
  template <typename T>
  T shfl_up(T value, unsigned delta) const {
    return words(value, [&](auto word) { return __shfl_up_sync(mask_, word, delta, Size); });
  }
  template <typename T>
  T shfl_xor(T value, unsigned mask) const {
    return words(value, [&](auto word) { return __shfl_xor_sync(mask_, word, mask, Size); });
  }
};

template <unsigned Size, typename Parent>
inline thread_block_tile<Size, Parent> tiled_partition(const Parent&) {
  return {};
}
inline coalesced_group tiled_partition(const thread_block&, unsigned size) {
  return coalesced_group(detail::tile_mask(size));
}
// The threads of a group that have the same predicate, or label, as the caller.
template <typename Group>
inline coalesced_group binary_partition(const Group& group, bool predicate) {
  const unsigned yes = __ballot_sync(group.lanes(), predicate);
  return coalesced_group(predicate ? yes : group.lanes() & ~yes);
}
template <typename Label, typename Group>
inline coalesced_group labeled_partition(const Group& group, Label label) {
  return coalesced_group(__match_any_sync(group.lanes(), label));
}

template <typename Group>
inline void sync(const Group& group) { group.sync(); }
template <typename Group>
inline auto thread_rank(const Group& group) { return group.thread_rank(); }
template <typename Group>
inline auto group_size(const Group& group) { return group.size(); }
template <typename Group>
inline void invoke_one(const Group& group, void (*call)()) {
  if (group.thread_rank() == 0) call();
}

using thread_group = coalesced_group;

template <typename T>
struct plus {
  T operator()(const T& a, const T& b) const { return a + b; }
};
template <typename T>
struct less {
  T operator()(const T& a, const T& b) const { return b < a ? b : a; }
};
template <typename T>
struct greater {
  T operator()(const T& a, const T& b) const { return a < b ? b : a; }
};
template <typename T>
struct bit_and {
  T operator()(const T& a, const T& b) const { return a & b; }
};
template <typename T>
struct bit_or {
  T operator()(const T& a, const T& b) const { return a | b; }
};
template <typename T>
struct bit_xor {
  T operator()(const T& a, const T& b) const { return a ^ b; }
};

// Every thread of the group gets the result.
template <typename Group, typename T, typename Operation>
inline T reduce(const Group& group, T value, Operation operation) {
  if ((group.size() & (group.size() - 1)) == 0) {
    for (unsigned step = group.size() / 2; step > 0; step /= 2) {
      value = operation(value, group.shfl_xor(value, step));
    }
    return value;
  }
  T result = group.shfl(value, 0);
  for (unsigned rank = 1; rank < group.size(); ++rank) {
    result = operation(result, group.shfl(value, rank));
  }
  return result;
}
template <typename Group, typename T, typename Operation = plus<T>>
inline T inclusive_scan(const Group& group, T value, Operation operation = {}) {
  T result = group.shfl(value, 0);
  for (unsigned rank = 1; rank < group.size(); ++rank) {
    const T other = group.shfl(value, rank);
    if (rank <= group.thread_rank()) result = operation(result, other);
  }
  return result;
}
template <typename Group, typename T, typename Operation = plus<T>>
inline T exclusive_scan(const Group& group, T value, Operation operation = {}) {
  const T inclusive = inclusive_scan(group, value, operation);
  const T before = group.shfl_up(inclusive, 1);
  return group.thread_rank() == 0 ? T{} : before;
}

// The threads of a group copy together, with cp.async where size and alignment allow.
namespace detail {
template <typename Group>
inline void copy_bytes(const Group& group, void* to, const void* from, std::size_t bytes) {
  const bool aligned = (reinterpret_cast<std::size_t>(to) | reinterpret_cast<std::size_t>(from)) % 4 == 0;
  const std::size_t whole = aligned ? bytes / 4 : 0;
  for (std::size_t i = group.thread_rank(); i < whole; i += group.size()) {
    ::cukit::emulator::cp_async(::cukit::emulator::shared_address(static_cast<unsigned*>(to) + i),
                                static_cast<const unsigned*>(from) + i, 4, 4);
  }
  for (std::size_t i = 4 * whole + group.thread_rank(); i < bytes; i += group.size()) {
    static_cast<unsigned char*>(to)[i] = static_cast<const unsigned char*>(from)[i];
  }
  ::cukit::emulator::cp_async_commit();
}
}  // namespace detail
template <typename Group, typename T, typename U>
inline void memcpy_async(const Group& group, T* to, const U* from, std::size_t bytes) {
  detail::copy_bytes(group, to, from, bytes);
}
template <typename Group>
inline void wait(const Group& group) {
  ::cukit::emulator::cp_async_wait(0);
  group.sync();
}
template <unsigned Pending, typename Group>
inline void wait_prior(const Group& group) {
  ::cukit::emulator::cp_async_wait(Pending);
  group.sync();
}

}  // namespace cooperative_groups
