// Expert order: a stable counting sort of the choices of tokens by expert.
//
// A choice is a pair (token, slot), numbered token * top_k + slot. Its rank is the number of
// earlier choices of the same expert; its row is
//
//   offsets[expert] + rank              without a capacity: experts' rows are contiguous
//   expert * capacity + rank            with a capacity; -1 (dropped) if rank >= capacity
//
// First, each block counts the choices of one chunk of tokens, at most 65535 choices. The counts
// [chunk, expert] are 16-bit, because every block reads all of them and this takes most of the
// time. Then each block adds up the counts of the chunks before its own and places its choices: the
// result does not depend on the order in which blocks run.
//
// Macros: BINS, the most experts: a power of two, at least 32; THREADS.
#pragma once

#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "moe/parameters.cuh"

namespace cukit {

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kBinsPerLane = BINS / kWarpSize;

// Shared memory of a block that places choices.
struct OrderTables {
  int totals[BINS];          // choices of each expert; after scan_tables, offsets
  int ranks[kWarps * BINS];  // [warp][expert]: choices of the previous warp, then next ranks
};

// The output arrays.
struct OrderResult {
  int* rows;       // [num_tokens, top_k]
  int* counts;     // [num_experts]
  int* offsets;    // [num_experts + 1]
  float* weights;  // [num_tokens, top_k], set to 0 for dropped choices; may be null
};

// A chunk's choices [first, end), and this warp's contiguous part of them, one choice per lane and
// round.
struct Choices {
  int first, end;
  int rounds;
  int warps;  // number of warps that have choices
  int own_first, own_end;

  CUKIT_DEVICE Choices(const RoutingParameters& p, int chunk) {
    first = min(chunk * p.chunk, p.num_tokens) * p.top_k;
    end = min((chunk + 1) * p.chunk, p.num_tokens) * p.top_k;
    rounds = (end - first + THREADS - 1) / THREADS;
    const int each = max(1, rounds * kWarpSize);
    warps = (end - first + each - 1) / each;
    own_first = first + static_cast<int>(threadIdx.x) / kWarpSize * each;
    own_end = min(own_first + each, end);
  }
};

// Called by all threads; the caller synchronises afterwards.
CUKIT_DEVICE void clear_tables(OrderTables& tables, const Choices& choices) {
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) tables.totals[bin] = 0;
  for (int i = threadIdx.x; i < max(choices.warps, 1) * BINS; i += THREADS) tables.ranks[i] = 0;
}

// Adds counts[chunks, num_experts] of all chunks to totals, and those of chunks before `chunk` to
// the first row of ranks. Called by all threads after clear_tables; the caller synchronises
// afterwards.
CUKIT_DEVICE void sum_counts(OrderTables& tables, const unsigned short* counts, int chunks, int chunk,
                             int num_experts) {
  constexpr int kParts = THREADS / BINS > 0 ? THREADS / BINS : 1;  // threads that share an expert
  for (int bin = threadIdx.x % BINS; bin < num_experts; bin += THREADS) {
    int total = 0, earlier = 0;
#pragma unroll 16
    for (int c = threadIdx.x / BINS; c < chunks; c += kParts) {
      const int count = counts[c * num_experts + bin];
      total += count;
      if (c < chunk) earlier += count;
    }
    atomicAdd(&tables.totals[bin], total);
    atomicAdd(&tables.ranks[bin], earlier);
  }
}

// The expert of a lane's first choice, loaded early to hide its latency. experts[i] belongs to
// choice choices.first + i.
CUKIT_DEVICE int first_expert(const int* experts, const Choices& choices) {
  const int i = choices.own_first + threadIdx.x % kWarpSize;
  return i < choices.own_end ? experts[i - choices.first] : BINS;
}

// Adds the choices of each warp to the next warp's row of ranks. Synchronisation as for sum_counts;
// `first` is from first_expert().
CUKIT_DEVICE void count_warps(OrderTables& tables, const int* experts, const Choices& choices,
                              int num_experts, int first) {
  const int warp = threadIdx.x / kWarpSize;
  if (warp + 1 >= choices.warps) return;
  for (int i = choices.own_first + threadIdx.x % kWarpSize; i < choices.own_end; i += kWarpSize) {
    const bool is_first = i - choices.own_first < kWarpSize;
    const unsigned expert = is_first ? first : experts[i - choices.first];
    if (expert < num_experts) atomicAdd(&tables.ranks[(warp + 1) * BINS + expert], 1);
  }
}

// Replaces totals by offsets and the warps' choices by ranks. writes: whether this block writes
// counts and offsets to memory. Called by all threads after a barrier; ends with a barrier.
CUKIT_DEVICE void scan_tables(OrderTables& tables, const Choices& choices, const OrderResult& result,
                              int num_experts, bool writes) {
  if (threadIdx.x < kWarpSize) {
    const int lane = threadIdx.x;
    int* const own = tables.totals + lane * kBinsPerLane;
    int sum = 0;
#pragma unroll
    for (int j = 0; j < kBinsPerLane; ++j) sum += own[j];
    int before = warp_sum_before(sum);
#pragma unroll
    for (int j = 0; j < kBinsPerLane; ++j) {
      const int expert = lane * kBinsPerLane + j;
      const int count = own[j];
      own[j] = before;
      if (writes && expert < num_experts) {
        result.counts[expert] = count;
        result.offsets[expert] = before;
      }
      before += count;
    }
    if (writes && lane == kWarpSize - 1) result.offsets[num_experts] = before;
  }
  // Starts with the last threads, because the first warp scans the totals.
  for (int bin = THREADS - 1 - threadIdx.x; bin < num_experts; bin += THREADS) {
    int rank = tables.ranks[bin];
    for (int warp = 1; warp < choices.warps; ++warp) {
      rank += tables.ranks[warp * BINS + bin];
      tables.ranks[warp * BINS + bin] = rank;
    }
  }
  __syncthreads();
}

// Assigns a row to each choice of this chunk. Called by all threads after scan_tables; `experts`
// and `first` as for count_warps.
CUKIT_DEVICE void place_choices(OrderTables& tables, const int* experts, const Choices& choices,
                                const RoutingParameters& p, const OrderResult& result, int first) {
  const int lane = threadIdx.x % kWarpSize;
  int* const ranks = tables.ranks + threadIdx.x / kWarpSize * BINS;
  for (int base = choices.own_first; base < choices.own_end; base += kWarpSize) {
    const int i = base + lane;
    unsigned expert = first;
    if (base > choices.own_first) expert = i < choices.own_end ? experts[i - choices.first] : BINS;
    const bool chosen = expert < p.num_experts;
    const unsigned peers = __match_any_sync(kFullMask, chosen ? expert : BINS);
    const int before = __popc(peers & ((1u << lane) - 1));
    const int rank = chosen ? ranks[expert] + before : 0;
    __syncwarp();
    if (chosen && before == 0) ranks[expert] += __popc(peers);
    __syncwarp();
    if (i >= choices.own_end) continue;
    const bool fits = chosen && (p.capacity == 0 || rank < p.capacity);
    const int start = chosen ? (p.capacity == 0 ? tables.totals[expert] : expert * p.capacity) : 0;
    result.rows[i] = fits ? start + rank : -1;
    if (!fits && result.weights != nullptr) result.weights[i] = 0.0f;
  }
}

}  // namespace cukit
