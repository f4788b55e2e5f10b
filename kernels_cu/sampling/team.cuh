// Reductions over the blocks of a row: a cluster, or a single block.
//
// Each block writes its values to the shared memory of all blocks. Slots are double-buffered: a
// block that writes the slots of exchange n has passed the barrier of exchange n - 1, so all blocks
// have read the slots of exchange n - 2.
//
// Macros: THREADS; CLUSTER 1|2|4|8 (above 1: sm_90).
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/reduce.cuh"

namespace cukit {

using uint64 = unsigned long long;

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kMessage = 4;  // words

template <typename T, typename Op>
CUKIT_DEVICE T warp_all(T value, const Op& combine) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

CUKIT_DEVICE uint64 warp_sum(uint64 value) {
  return warp_all(value, [](uint64 a, uint64 b) { return a + b; });
}

// Sum over the lanes up to and including this one.
CUKIT_DEVICE uint64 warp_scan(uint64 value) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint64 other = __shfl_up_sync(kFullMask, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

class Team {
 public:
  struct Shared {
    unsigned slots[2][CLUSTER][kMessage];
    uint64 warps[2][kWarps];
    unsigned counts[2][kWarps];
  };

  struct Sum {
    uint64 total;   // over the row
    uint64 before;  // over the warps before this one, including those of lower-ranked blocks
    unsigned count;  // over the row
  };

  struct Gathered {
    unsigned least, count;
    bool failed;
  };

  // Other blocks may write to this block's shared memory once the constructor has been called, so
  // the shared memory must be initialised before.
  CUKIT_DEVICE Team(Shared& shared) : shared_(shared) {
    rank_ = CLUSTER > 1 ? cluster_rank() : 0;
    if constexpr (CLUSTER > 1) {
      cluster_arrive();
    } else {
      __syncthreads();
    }
  }

  // Must be called once, before any access to other blocks' shared memory.
  CUKIT_DEVICE void wait_for_start() const {
    if constexpr (CLUSTER > 1) cluster_wait();
  }

  CUKIT_DEVICE int rank() const { return rank_; }
  CUKIT_DEVICE bool is_leader() const { return rank_ == 0; }

  // Barrier over all threads of the row.
  CUKIT_DEVICE void sync() const {
    if constexpr (CLUSTER > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // Sums a 64-bit value and a count over the row; all threads get the result.
  CUKIT_DEVICE Sum sum(uint64 value, unsigned count = 0) {
    buffer_ ^= 1;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const uint64 of_warp = warp_sum(value);
    const unsigned count_of_warp = __reduce_add_sync(kFullMask, count);
    if (lane == 0) {
      shared_.warps[buffer_][warp] = of_warp;
      shared_.counts[buffer_][warp] = count_of_warp;
    }
    __syncthreads();
    const uint64 other = lane < kWarps ? shared_.warps[buffer_][lane] : 0;
    Sum sum;
    sum.total = warp_sum(other);
    sum.before = warp_sum(lane < warp ? other : 0);
    sum.count = __reduce_add_sync(kFullMask, lane < kWarps ? shared_.counts[buffer_][lane] : 0u);
    if constexpr (CLUSTER > 1) {
      const unsigned message[kMessage] = {static_cast<unsigned>(sum.total),
                                          static_cast<unsigned>(sum.total >> 32), sum.count, 0};
      if (threadIdx.x < CLUSTER) push(message, threadIdx.x, rank_);
      sync();
      sum.total = sum.count = 0;
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) {
        const unsigned* slot = shared_.slots[buffer_][i];
        const uint64 part = static_cast<uint64>(slot[1]) << 32 | slot[0];
        sum.total += part;
        if (i < rank_) sum.before += part;
        sum.count += slot[2];
      }
    }
    return sum;
  }

  // Minimum over the row; all threads get the result.
  CUKIT_DEVICE unsigned least(unsigned value) { return gather(value, 0, false).least; }

  // Minimum of `value` over the threads, sum of `count` over the blocks, and whether any block failed.
  CUKIT_DEVICE Gathered gather(unsigned value, unsigned count, bool failed) {
    buffer_ ^= 1;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    value = __reduce_min_sync(kFullMask, value);
    if (lane == 0) shared_.counts[buffer_][warp] = value;
    __syncthreads();
    value = __reduce_min_sync(kFullMask, lane < kWarps ? shared_.counts[buffer_][lane] : ~0u);
    Gathered all{value, count, failed};
    if constexpr (CLUSTER > 1) {
      const unsigned message[kMessage] = {value, count, failed, 0};
      if (threadIdx.x < CLUSTER) push(message, threadIdx.x, rank_);
      sync();
      all.count = 0;
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) {
        const unsigned* slot = shared_.slots[buffer_][i];
        all.least = min(all.least, slot[0]);
        all.count += slot[1];
        all.failed = all.failed || slot[2] != 0;
      }
    }
    return all;
  }

  // Broadcasts a message to all threads, from the one thread of the row that sets `sends`.
  CUKIT_DEVICE void broadcast(unsigned (&message)[kMessage], bool sends) {
    buffer_ ^= 1;
    if (sends) {
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) push(message, i, 0);
    }
    sync();
#pragma unroll
    for (int w = 0; w < kMessage; ++w) message[w] = shared_.slots[buffer_][0][w];
  }

  // atomicAdd on the copy of `counter` of block `rank`.
  CUKIT_DEVICE unsigned add_to(int rank, unsigned* counter, unsigned value) const {
    if constexpr (CLUSTER > 1) {
      return fetch_add_remote(counter, rank, value);
    } else {
      return atomicAdd(counter, value);
    }
  }

  CUKIT_DEVICE void store_to_leader(uint64* to, uint64 value) const {
    if constexpr (CLUSTER > 1) {
      float* words = reinterpret_cast<float*>(to);
      store_remote(words, 0, __uint_as_float(static_cast<unsigned>(value)));
      store_remote(words + 1, 0, __uint_as_float(static_cast<unsigned>(value >> 32)));
    } else {
      *to = value;
    }
  }

 private:
  CUKIT_DEVICE void push(const unsigned (&message)[kMessage], int to, int slot) {
#pragma unroll
    for (int w = 0; w < kMessage; ++w) {
      unsigned* place = &shared_.slots[buffer_][slot][w];
      if constexpr (CLUSTER > 1) {
        store_remote(reinterpret_cast<float*>(place), to, __uint_as_float(message[w]));
      } else {
        *place = message[w];
      }
    }
  }

  Shared& shared_;
  int rank_;
  int buffer_ = 0;
};

}  // namespace cukit
