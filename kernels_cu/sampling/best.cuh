// Finds the first (most likely) tokens of a row, at most 128, sorted, usually in a single pass over
// the row.
//
// A block streams the row through registers. After the first round the largest logits of 128 groups
// of threads yield a threshold that at least `want` tokens reach; tokens at or above it are
// appended to a list in shared memory. At the end the threshold is recomputed from all rounds. Each
// listed token that reaches the final threshold is ranked by counting the entries before it, and is
// stored at that rank.
//
// If the list overflows, e.g. because logits increase along the row, a second pass fills it with the final
// threshold. If it overflows again (thousands of equal logits), the caller uses select.cuh.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/max_nan.cuh"
#include "sampling/atoms.cuh"
#include "sampling/list.cuh"
#include "sampling/select.cuh"

namespace cukit {

constexpr int kMaxBest = 128;  // tokens; MAX_BEST in cukit/sampling/_plan.py
constexpr int kStreamed = 2 * kBins * sizeof(unsigned) / sizeof(uint64);  // list capacity: reuses the bins

class Best {
 public:
  CUKIT_DEVICE Best(Team& team, const Row& row, Workspace& space, Atoms& atoms)
      : team_(team),
        row_(row),
        space_(space),
        atoms_(atoms),
        list_(reinterpret_cast<uint64*>(space.bins), &space.cursor, kStreamed) {}

  // Stores the first `want` tokens in the workspace's list, sorted, padded with kNoRank; tokens
  // with logit -infinity are omitted. weigh: also store the atoms' sums, with `slope`.
  CUKIT_DEVICE Streamed collect(int want, bool weigh, float slope) {
    float limit = 0.0f, largest = -infinity();
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      atoms_.each<false>([&](int i, int atom, const Row::Atom& vectors, int first, float lane_max) {
        if (pass == 0) {
          largest = max_nan(largest, lane_max);
          if (weigh && atom >= 0) atoms_.weigh(atom, vectors, first, lane_max, slope);
          if (i == 0) limit = bound(largest, want);
        }
        if (lane_max >= limit) list_.append(row_, vectors, first, limit);
      });
      if (row_.rounds() > 1) {
        limit = bound(largest, want);
      } else {
        __syncthreads();
      }
      if (list_.size() <= kStreamed || row_.rounds() == 1 || pass == 1) break;
      __syncthreads();
      list_.clear();
      __syncthreads();
    }
    const unsigned own = descending_key(largest + 0.0f);
    const unsigned count = list_.size();
    Streamed all{own, team_.least(own), count < want ? count : want, count > kStreamed};
    if (all.failed) return all;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const unsigned last = descending_key(limit);
#pragma unroll 1
    for (unsigned i = warp; i < count; i += kWarps) {
      const uint64 entry = list_[i];
      if (static_cast<unsigned>(entry >> 32) > last) continue;
      unsigned before = 0;
      for (unsigned j = lane; j < count; j += kWarpSize) before += list_[j] < entry;
      before = __reduce_add_sync(kFullMask, before);
      if (lane == 0 && before < static_cast<unsigned>(want)) space_.list[before] = entry;
    }
    for (int i = static_cast<int>(count) + static_cast<int>(threadIdx.x); i < want; i += THREADS) {
      space_.list[i] = kNoRank;
    }
    __syncthreads();
    return all;
  }

 private:
  static constexpr int kGroups = THREADS < kMaxBest ? THREADS : kMaxBest;
  static constexpr int kTogether = THREADS / kGroups;  // threads per group

  // A threshold that at least `want` tokens reach, if `want` tokens are above -infinity: the
  // want-th largest of the groups' maxima, or the lowest finite float if there are fewer groups.
  // `largest`: the maximum of this thread. Contains barriers.
  CUKIT_DEVICE float bound(float largest, int want) {
    unsigned key = descending_key(largest + 0.0f);
#pragma unroll
    for (int offset = 1; offset < kTogether; offset *= 2) {
      key = min(key, __shfl_xor_sync(kFullMask, key, offset));
    }
    const unsigned group = threadIdx.x / kTogether, part = threadIdx.x % kTogether;
    if (part == 0) space_.groups[group] = key;
    __syncthreads();
    unsigned before = 0;
#pragma unroll 4
    for (unsigned j = part; j < kGroups; j += kTogether) {
      const unsigned other = space_.groups[j];
      before += other < key || (other == key && j < group);
    }
#pragma unroll
    for (int offset = 1; offset < kTogether; offset *= 2) {
      before += __shfl_xor_sync(kFullMask, before, offset);
    }
    if (part == 0 && before == static_cast<unsigned>(min(want, kGroups)) - 1) space_.limit = key;
    __syncthreads();
    constexpr float kLowest = -3.402823466e38f;
    const float limit = logit_of(space_.limit);
    return want > kGroups ? kLowest : limit >= kLowest ? limit : kLowest;
  }

  Team& team_;
  const Row& row_;
  Workspace& space_;
  Atoms& atoms_;
  List list_;
};

}  // namespace cukit
