// Finds the first (most likely) tokens of a row, at most 128, sorted, in a single pass over the row.
//
// A block streams its range of atoms through registers. After the first round the largest logits of 128
// groups of threads yield a threshold that at least `want` tokens reach; tokens at or above it are
// appended to a list in shared memory. At the end the threshold is recomputed from all rounds. Each listed
// token that reaches it is ranked by counting the entries before it, and is stored at that rank in the
// memory of block 0, which then merges the lists of the blocks.
//
// If the list overflows, e.g. because logits increase along the row, a second pass fills it with the final
// threshold. If it overflows again (thousands of equal logits), the row is left to select.cuh.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/max_nan.cuh"
#include "sampling/select.cuh"

namespace cukit {

constexpr int kMostBest = 128;  // tokens; MOST_BEST in cukit/sampling/_plan.py
constexpr int kStreamed = 2 * kBins * sizeof(unsigned) / sizeof(uint64);  // list capacity: reuses the bins
static_assert(ATOM * VEC <= 32, "a bit for each logit of a lane");
static_assert(kMostBest * CLUSTER <= kMost, "block 0's list holds the lists of all blocks");

class Best {
 public:
  // parts: shared memory for rounds_ * THREADS elements.
  CUKIT_DEVICE Best(Team& team, const Row& row, Workspace& space, Part* parts)
      : team_(team), row_(row), space_(space), parts_(parts) {
    const int atoms = (row.columns() + kAtomTokens - 1) / kAtomTokens;
    const int share = (atoms + CLUSTER - 1) / CLUSTER;
    begin_ = team.rank() * share;
    end_ = min(begin_ + share, atoms);
    rounds_ = (share + kWarps - 1) / kWarps;
  }

  // Stores the first `want` tokens of each block in block 0's list, sorted, padded with kNoRank; tokens of
  // logit -infinity are left out. weigh: also store the atoms' sums for total(), with `slope`.
  CUKIT_DEVICE Team::Gathered collect(int want, bool weigh, float slope) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float limit = 0.0f, largest = -infinity();
    unsigned count = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
      for (int i = 0; i < rounds_; ++i) {
        const int atom = begin_ + i * kWarps + warp;
        const int first = row_.first_of(atom);
        Row::Atom vectors;
        float most = -infinity();
        if (atom < end_) {
          row_.load_atom(vectors, first);
          most = row_.largest_of(vectors, first);
        }
        if (pass == 0) {
          largest = max_nan(largest, most);
          if (weigh) {
            Part part;
            part.largest = most;
            part.sum = atom < end_ ? row_.sum_of(vectors, first, most, slope) : 0.0f;
            parts_[i * THREADS + threadIdx.x] = part;
          }
          if (i == 0) limit = bound(largest, want);
        }
        if (most >= limit) append(vectors, first, limit);
      }
      if (rounds_ > 1) {
        limit = bound(largest, want);
      } else {
        __syncthreads();
      }
      count = space_.cursor;
      if (count <= kStreamed || rounds_ == 1 || pass == 1) break;
      __syncthreads();
      if (threadIdx.x == 0) space_.cursor = 0;
      __syncthreads();
    }
    const bool failed = count > kStreamed;
    team_.wait_for_start();
    if (!failed) {
      uint64* places = space_.list + team_.rank() * kMostBest;
      const unsigned last = descending_key(limit);
#pragma unroll 1
      for (unsigned i = warp; i < count; i += kWarps) {
        const uint64 own = entries()[i];
        if (static_cast<unsigned>(own >> 32) > last) continue;
        unsigned before = 0;
        for (unsigned j = lane; j < count; j += kWarpSize) before += entries()[j] < own;
        before = __reduce_add_sync(kFullMask, before);
        if (lane == 0 && before < static_cast<unsigned>(want)) {
          team_.store_to_leader(&places[before], own);
        }
      }
      for (int i = static_cast<int>(count) + static_cast<int>(threadIdx.x); i < want; i += THREADS) {
        team_.store_to_leader(&places[i], kNoRank);
      }
    }
    return team_.gather(descending_key(largest), min(count, static_cast<unsigned>(want)), failed);
  }

  // Sum of all weights of the row, after collect(want, true, slope).
  CUKIT_DEVICE uint64 total(float largest, float slope) {
    uint64 sum = 0;
    for (int i = 0; i < rounds_; ++i) {
      sum += weight_of(parts_[i * THREADS + threadIdx.x], largest, slope);
    }
    return team_.sum(sum).total;
  }

  // Merges the blocks' lists, in block 0: the first `want` tokens, padded with kNoRank.
  CUKIT_DEVICE uint64* merged(int want) {
    if constexpr (CLUSTER == 1) return space_.list;
    uint64* into = entries();
    for (int i = threadIdx.x; i < want; i += THREADS) into[i] = kNoRank;
    __syncthreads();
    for (int i = threadIdx.x; i < want * CLUSTER; i += THREADS) {
      const uint64 own = space_.list[i / want * kMostBest + i % want];
      if (own == kNoRank) continue;
      // Rank of the entry: the number of entries before it in each list, by interleaved binary searches.
      int before[CLUSTER];
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) before[other] = 0;
#pragma unroll 1
      for (int step = kMostBest; step > 0; step /= 2) {
#pragma unroll
        for (int other = 0; other < CLUSTER; ++other) {
          const int upto = before[other] + step;
          if (upto <= want && space_.list[other * kMostBest + upto - 1] < own) before[other] = upto;
        }
      }
      int place = 0;
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) place += before[other];
      if (place < want) into[place] = own;
    }
    __syncthreads();
    return into;
  }

 private:
  static constexpr int kGroups = THREADS < kMostBest ? THREADS : kMostBest;
  static constexpr int kTogether = THREADS / kGroups;  // threads per group

  CUKIT_DEVICE uint64* entries() const { return reinterpret_cast<uint64*>(space_.bins); }

  // A threshold that `want` tokens of the block reach, if that many are above -infinity: the want-th largest
  // of the groups' maxima. `largest`: the maximum of this thread. Contains barriers.
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

  // Few tokens reach the limit, so a rolled loop reloads them: unrolled code would cost instruction fetches.
  CUKIT_DEVICE void append(const Row::Atom& vectors, int first, float limit) {
    unsigned reaching = 0;
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      float x[VEC];
      row_.values_of(x, vectors, u, first);
#pragma unroll
      for (int j = 0; j < VEC; ++j) reaching |= x[j] >= limit ? 1u << (u * VEC + j) : 0u;
    }
#pragma unroll 1
    while (reaching != 0) {
      const int bit = __ffs(static_cast<int>(reaching)) - 1;
      reaching &= reaching - 1;
      const int token = row_.column_of(first, bit / VEC) + bit % VEC;
      const unsigned at = atomicAdd(&space_.cursor, 1u);
      if (at < kStreamed) entries()[at] = rank_of(row_.at(token), token);
    }
  }

  Team& team_;
  const Row& row_;
  Workspace& space_;
  Part* parts_;
  int begin_, end_, rounds_;
};

}  // namespace cukit
