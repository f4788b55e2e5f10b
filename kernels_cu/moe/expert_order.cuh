// Expert order: a stable counting sort of the choices of tokens by expert.
//
// A choice is a pair (token, slot), numbered token * top_k + slot. Its rank is the number of
// earlier choices of the same expert; its row is
//
//   offsets[expert] + rank              without a capacity: the rows of each expert are contiguous
//   expert * capacity + rank            with a capacity; -1 (dropped) if rank >= capacity
//
// A first kernel counts the choices of each expert in each chunk of tokens. In a second kernel each
// block adds up the counts of the chunks before its own and places its choices: the result does not
// depend on the order in which blocks run.
//
// The second kernel is a programmatic dependent launch: it starts when all blocks of the first are
// running or have ended. If the first kernel is a router, the second polls the words that the
// router writes instead of waiting for the end of the router's grid: each block of the router fills
// its words with a value that is never a result before it lets the second kernel start. Polling
// cannot deadlock, because all blocks that write are running. Chunks with more choices than threads
// are not polled (Choices::polled). If the first kernel is count_experts, which is too short to
// fill its words first, the second waits for the end of that grid before it reads the counts.
//
// Macros: BINS, the maximum number of experts: a power of two, at least 32; THREADS.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/reduce.cuh"
#include "moe/parameters.cuh"

namespace cukit {

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kBinsPerLane = BINS / kWarpSize;

// Shared memory of a block that places choices.
struct OrderTables {
  int earlier[BINS];         // choices per expert in earlier chunks; then its first row in this one
  int others[BINS];          // choices per expert in this chunk and later ones
  int ranks[kWarps * BINS];  // [warp][expert]: choices of the previous warp, then next ranks
};

// Called by all threads; the caller synchronises afterwards.
CUKIT_DEVICE void clear_bins(int* bins) {
#pragma unroll
  for (int first = 0; first < BINS; first += THREADS) {
    const int bin = first + threadIdx.x;
    if (bin < BINS) bins[bin] = 0;
  }
}

// The output arrays.
struct OrderResult {
  int* rows;       // [num_tokens, top_k]
  int* counts;     // [num_experts]
  int* offsets;    // [num_experts + 1]
  float* weights;  // [num_tokens, top_k], set to 0 for dropped choices; may be null
};

// The counts of a chunk: words of four 16-bit counts; word w has experts w, w + words, ..., where
// `words` is the number of words of a chunk. A count is at most kMaxCount, so that sums of
// kWordsPerSum words do not carry and no word equals kNoCounts.
using CountWord = unsigned long long;
constexpr int kWordsPerSum = 4;
constexpr int kMaxCount = 16383;
static_assert(kWordsPerSum * kMaxCount < 1 << 16, "sums do not carry");
constexpr CountWord kNoCounts = ~0ull;
constexpr int kNoExpert = -1;

CUKIT_DEVICE int count_words(int num_experts) { return (num_experts + 3) / 4; }
// For kernels that exchange counts: a thread writes at most one word of a chunk's counts.
constexpr bool kCountsFit = BINS / 4 <= THREADS;

// A chunk's tokens and choices, and this warp's contiguous part of the choices, one choice per lane
// and round. own_first and own_end are relative to `first`, because absolute indices beyond the
// last choice can overflow an int.
struct Choices {
  int first_token, tokens;
  int first, count;
  int warps;  // number of warps that have choices
  int own_first, own_end;

  CUKIT_DEVICE Choices(const RoutingParameters& p, int chunk) {
    const unsigned num_tokens = p.num_tokens;
    first_token = min(static_cast<unsigned>(chunk) * p.chunk, num_tokens);
    tokens = min(static_cast<unsigned>(p.chunk), num_tokens - first_token);
    first = first_token * p.top_k;
    count = tokens * p.top_k;
    const int rounds = (count + THREADS - 1) / THREADS;
    const int each = max(1, rounds * kWarpSize);
    warps = (count + each - 1) / each;
    own_first = static_cast<int>(threadIdx.x) / kWarpSize * each;
    own_end = min(own_first + each, count);
  }

  // Whether the second kernel polls a router; the same for all chunks.
  CUKIT_DEVICE static bool polled(const RoutingParameters& p) {
    return static_cast<long long>(p.chunk) * p.top_k <= THREADS;
  }
};

// In a router: fills the words that the second kernel polls, and lets it start. Called by all
// threads; contains a barrier.
CUKIT_DEVICE void release_order(CountWord* counts, int* experts, const Choices& choices,
                                const RoutingParameters& p) {
  const bool polled = Choices::polled(p);
  if (polled) {
    const int words = count_words(p.num_experts);
    if (threadIdx.x < words) store_relaxed(counts + blockIdx.x * words + threadIdx.x, kNoCounts);
    const int i = threadIdx.x;
    if (i < choices.count) store_relaxed(experts + choices.first + i, kNoExpert);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (polled) __threadfence();
    release_next_grid();
  }
}

// In the first kernel: writes the counts of this block's chunk from bins[BINS].
CUKIT_DEVICE void write_counts(CountWord* counts, const int* bins, int num_experts) {
  const int words = count_words(num_experts);
  const int word = threadIdx.x;
  if (word >= words) return;
  CountWord packed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    packed |= static_cast<CountWord>(bins[word + j * words]) << 16 * j;
  }
  store_relaxed(counts + blockIdx.x * words + word, packed);
}

// Called by all threads; the caller synchronises afterwards.
CUKIT_DEVICE void clear_tables(OrderTables& tables, const Choices& choices) {
  clear_bins(tables.earlier);
  clear_bins(tables.others);
  for (int i = threadIdx.x; i < max(choices.warps, 1) * BINS; i += THREADS) tables.ranks[i] = 0;
}

CUKIT_DEVICE void add_counts(int* bins, int words, CountWord packed) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    atomicAdd(bins + j * words, static_cast<int>(packed >> 16 * j & 0xffff));
  }
}

// Adds the counts of chunks before `chunk` to tables.earlier, and those of the others to
// tables.others; polls words that have not been written. Called by all threads after clear_tables
// and a barrier; the caller synchronises afterwards.
CUKIT_DEVICE void sum_counts(OrderTables& tables, const CountWord* counts, int chunks, int chunk,
                             int num_experts) {
  const int words = count_words(num_experts);
  const int parts = THREADS / words;  // of the chunks
  const int each = (chunks + parts - 1) / parts;
  const int part = static_cast<int>(threadIdx.x) / words;
  const int word = static_cast<int>(threadIdx.x) - part * words;
  const int end = part < parts ? min((part + 1) * each, chunks) : 0;
  for (int base = part * each; base < end; base += kWordsPerSum) {
    CountWord packed[kWordsPerSum];
#pragma unroll
    for (int i = 0; i < kWordsPerSum; ++i) {
      packed[i] = base + i < end ? load_relaxed(counts + (base + i) * words + word) : 0;
    }
    CountWord earlier = 0, others = 0;
#pragma unroll
    for (int i = 0; i < kWordsPerSum; ++i) {
      while (packed[i] == kNoCounts) packed[i] = load_relaxed(counts + (base + i) * words + word);
      if (base + i < chunk) {
        earlier += packed[i];
      } else {
        others += packed[i];
      }
    }
    if (base < chunk) add_counts(tables.earlier + word, words, earlier);
    if (base + kWordsPerSum > chunk) add_counts(tables.others + word, words, others);
  }
}

// The expert of a lane's first choice (BINS if the lane has no choice), and the lanes of the warp
// with the same expert.
struct FirstChoice {
  unsigned expert, peers;
};

CUKIT_DEVICE unsigned same_expert(unsigned expert, int num_experts) {
  return __match_any_sync(kFullMask, expert < num_experts ? expert : BINS);
}

// Adds the choices of each warp to the next warp's row of ranks. experts: those of the chunk's
// choices. Polls: rereads each expert until the router has written it. Called by all threads after
// clear_tables and a barrier; the caller synchronises afterwards.
template <bool Polls>
CUKIT_DEVICE FirstChoice count_warps(OrderTables& tables, const int* experts, const Choices& choices,
                                     int num_experts) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  FirstChoice first = {BINS, 0};
  for (int base = choices.own_first; base < choices.own_end; base += kWarpSize) {
    const int i = base + lane;
    unsigned expert = BINS;
    if (i < choices.own_end) {
      do {
        expert = Polls ? load_relaxed(experts + i) : experts[i];
      } while (Polls && static_cast<int>(expert) == kNoExpert);
    }
    const unsigned peers = same_expert(expert, num_experts);
    if (base == choices.own_first) first = {expert, peers};
    const bool leads = (peers & ((1u << lane) - 1)) == 0;
    if (warp + 1 < choices.warps && expert < num_experts && leads) {
      tables.ranks[(warp + 1) * BINS + expert] += __popc(peers);
    }
    __syncwarp();
  }
  return first;
}

// Replaces the counts of each warp in tables.ranks by prefix sums: the rank, within the chunk, of
// the warp's first choice of each expert. Called by all threads after count_warps and a barrier;
// the caller synchronises afterwards.
CUKIT_DEVICE void rank_warps(OrderTables& tables, const Choices& choices, int num_experts) {
  for (int bin = threadIdx.x; bin < num_experts; bin += THREADS) {
    int rank = 0;
    for (int warp = 1; warp < choices.warps; ++warp) {
      rank += tables.ranks[warp * BINS + bin];
      tables.ranks[warp * BINS + bin] = rank;
    }
  }
}

// Replaces tables.earlier by the row of each expert's first choice in this chunk. writes: whether
// this block writes counts and offsets to memory. Called by all threads after a barrier; ends with a
// barrier.
CUKIT_DEVICE void scan_tables(OrderTables& tables, const OrderResult& result,
                              const RoutingParameters& p, bool writes) {
  if (threadIdx.x < kWarpSize) {
    const int lane = threadIdx.x;
    const int first = lane * kBinsPerLane;
    int sum = 0;
#pragma unroll
    for (int j = 0; j < kBinsPerLane; ++j) sum += tables.earlier[first + j] + tables.others[first + j];
    int before = warp_sum_before(sum);
#pragma unroll
    for (int j = 0; j < kBinsPerLane; ++j) {
      const int expert = first + j;
      const int earlier = tables.earlier[expert];
      const int count = earlier + tables.others[expert];
      tables.earlier[expert] = earlier + (p.capacity == 0 ? before : expert * p.capacity);
      if (writes && expert < p.num_experts) {
        result.counts[expert] = count;
        result.offsets[expert] = before;
      }
      before += count;
    }
    if (writes && lane == kWarpSize - 1) result.offsets[p.num_experts] = before;
  }
  __syncthreads();
}

// Assigns a row to each choice of this chunk. Called by all threads after scan_tables; `experts` and
// `first` from count_warps.
CUKIT_DEVICE void place_choices(OrderTables& tables, const int* experts, const Choices& choices,
                                const RoutingParameters& p, const OrderResult& result,
                                const FirstChoice& first) {
  const int lane = threadIdx.x % kWarpSize;
  int* const ranks = tables.ranks + threadIdx.x / kWarpSize * BINS;
  for (int base = choices.own_first; base < choices.own_end; base += kWarpSize) {
    const int i = base + lane;
    unsigned expert = first.expert;
    unsigned peers = first.peers;
    if (base > choices.own_first) {
      expert = i < choices.own_end ? experts[i] : BINS;
      peers = same_expert(expert, p.num_experts);
    }
    const bool chosen = expert < p.num_experts;
    const int before = __popc(peers & ((1u << lane) - 1));
    const int row = chosen ? tables.earlier[expert] + ranks[expert] + before : 0;
    __syncwarp();
    if (chosen && before == 0) ranks[expert] += __popc(peers);
    __syncwarp();
    if (i >= choices.own_end) continue;
    const bool fits = chosen && (p.capacity == 0 || row < (expert + 1) * p.capacity);
    result.rows[choices.first + i] = fits ? row : -1;
    if (!fits && result.weights != nullptr) result.weights[choices.first + i] = 0.0f;
  }
}

}  // namespace cukit
