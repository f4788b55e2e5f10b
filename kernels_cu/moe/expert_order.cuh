// Expert order: a stable counting sort of the choices of tokens by expert.
//
// A choice is a pair (token, slot), numbered token * top_k + slot. Its rank is the number of earlier
// choices of the same expert; its row is
//
//   offsets[expert] + rank              without a capacity: experts lie one behind the other
//   expert * capacity + rank            with one: -1, dropped, where rank >= capacity
//
// Chunks of tokens are counted first, each by a block (counts[chunk, expert]). Then each block adds up
// the counts of the chunks before its own and places its choices: the result does not depend on the
// order in which blocks run.
//
// Macros: BINS, experts at most: a power of two, 32 or more; THREADS.
#pragma once

#include "common/platform.cuh"
#include "moe/parameters.cuh"

namespace cukit {

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kBinsPerLane = BINS / kWarpSize;

// Shared memory of a block that places choices.
struct OrderTables {
  int totals[BINS];          // choices of each expert; after scan(): offsets
  int ranks[kWarps * BINS];  // [warp][expert]: choices of a warp, then its next ranks
};

// The arrays that ordering fills.
struct OrderResult {
  int* rows;     // [num_tokens, top_k]
  int* counts;   // [num_experts]
  int* offsets;  // [num_experts + 1]
  float* weights;  // [num_tokens, top_k], those of dropped choices become 0; null: none
};

// A chunk's choices: from `first` to before `end`.
struct Choices {
  int first, end;

  CUKIT_DEVICE Choices(const RoutingParameters& p, int chunk)
      : first(min(chunk * p.chunk, p.num_tokens) * p.top_k),
        end(min((chunk + 1) * p.chunk, p.num_tokens) * p.top_k) {}
};

// Counts the choices of a chunk into bins[BINS] of shared memory. All threads; barriers at both ends
// are the caller's.
CUKIT_DEVICE void count_choices(int* bins, const int* experts, const Choices& choices,
                                int num_experts) {
  for (int i = choices.first + threadIdx.x; i < choices.end; i += THREADS) {
    const unsigned expert = experts[i];
    if (expert < num_experts) atomicAdd(&bins[expert], 1);
  }
}

// Sums counts[chunks, num_experts] over all chunks into totals, over those before `chunk` into the
// first row of ranks. All threads; ends with a barrier.
CUKIT_DEVICE void sum_counts(OrderTables& tables, const int* counts, int chunks, int chunk,
                             int num_experts) {
  constexpr int kParts = THREADS / BINS > 0 ? THREADS / BINS : 1;  // threads that share an expert
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
    tables.totals[bin] = 0;
    tables.ranks[bin] = 0;
  }
  __syncthreads();
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
  __syncthreads();
}

// Replaces totals by offsets; one block of the grid writes both to memory. All threads; ends with a
// barrier.
CUKIT_DEVICE void scan_totals(OrderTables& tables, const OrderResult& result, int num_experts,
                              bool writes) {
  if (threadIdx.x < kWarpSize) {
    const int lane = threadIdx.x;
    int* const own = tables.totals + lane * kBinsPerLane;
    int sum = 0;
#pragma unroll
    for (int j = 0; j < kBinsPerLane; ++j) sum += own[j];
    int upto = sum;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(kFullMask, upto, distance);
      if (lane >= distance) upto += other;
    }
    int before = upto - sum;
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
  __syncthreads();
}

// Places the choices of a chunk. Before: totals hold offsets, the first row of ranks the choices of
// earlier chunks. All threads.
CUKIT_DEVICE void place_choices(OrderTables& tables, const int* experts, const Choices& choices,
                                const RoutingParameters& p, const OrderResult& result) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int rounds = (choices.end - choices.first + THREADS - 1) / THREADS;
  const int first = choices.first + warp * rounds * kWarpSize;
  const int end = min(first + rounds * kWarpSize, choices.end);

  // Warp w counts into the row of warp w + 1, so that sums over rows give where each warp begins.
  for (int bin = BINS + threadIdx.x; bin < kWarps * BINS; bin += THREADS) tables.ranks[bin] = 0;
  __syncthreads();
  if (warp + 1 < kWarps) {
    for (int i = first + lane; i < end; i += kWarpSize) {
      const unsigned expert = experts[i];
      if (expert < p.num_experts) atomicAdd(&tables.ranks[(warp + 1) * BINS + expert], 1);
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < p.num_experts; bin += THREADS) {
    int rank = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      rank += tables.ranks[w * BINS + bin];
      tables.ranks[w * BINS + bin] = rank;
    }
  }
  __syncthreads();

  int* const ranks = tables.ranks + warp * BINS;
  for (int round = 0; round < rounds; ++round) {
    const int i = first + round * kWarpSize + lane;
    const unsigned expert = i < end ? experts[i] : BINS;
    const bool chosen = expert < p.num_experts;
    const unsigned peers = __match_any_sync(kFullMask, chosen ? expert : BINS);
    const int before = __popc(peers & ((1u << lane) - 1));
    const int rank = chosen ? ranks[expert] + before : 0;
    __syncwarp();
    if (chosen && before == 0) ranks[expert] += __popc(peers);
    __syncwarp();
    if (i >= end) continue;
    const bool fits = chosen && (p.capacity == 0 || rank < p.capacity);
    const int start = chosen ? (p.capacity == 0 ? tables.totals[expert] : expert * p.capacity) : 0;
    result.rows[i] = fits ? start + rank : -1;
    if (!fits && result.weights != nullptr) result.weights[i] = 0.0f;
  }
}

}  // namespace cukit
