// Router: the top_k experts of every token, their weights, and the number of choices of each
// expert.
//
//   score = softmax(logits) or sigmoid(logits)
//   experts = the top_k largest of logits, or with a bias of score + bias; ties to the lowest index
//   weights = score[experts], with `renormalize` divided by their sum
//
// Papers: Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437 (sigmoid, bias).
// NaN ranks below all other logits; if a row's softmax is undefined, its weights are NaN, but its
// experts are still valid.
//
// Mapping: one block per chunk of tokens, one warp per token at a time (router_scores.cuh). A
//   choice takes one maximum over the warp, of order-preserving integer keys, and a ballot.
//   SINGLE_LAUNCH: the grid is one block, which also orders the choices. Otherwise
//   order_experts.cu orders the choices; its blocks may already be resident on the same SMs, and
//   poll `experts` and `chunk_counts`.
// Shared memory: 4 * BINS * (THREADS / 32 + 2) + 8 * THREADS bytes, with SINGLE_LAUNCH
//   4 * MAX_CHOICES more, with LOSSES THREADS / 8 more; static.
// Macros: router_scores.cuh; expert_order.cuh; RENORMALIZE, BIASED, LOSSES, SINGLE_LAUNCH 0|1;
//   BLOCKS_PER_SM 1|2 (2 leaves registers for a block of order_experts); MAX_CHOICES, an upper
//   bound of num_tokens * top_k with SINGLE_LAUNCH. top_k is at most 32.
// Minimum architecture: sm_80. Computes in float; deterministic.
// Reference: cukit/reference/moe.py, topk_router.
#include "common/platform.cuh"
#include "common/ptx/global_order.cuh"
#include "common/types.cuh"
#include "moe/expert_order.cuh"
#include "moe/router_losses.cuh"
#include "moe/router_scores.cuh"

namespace {

using T = cukit::element_t;
using cukit::kFullMask;
using cukit::kPerLane;
using cukit::kWarps;
using cukit::kWarpSize;

static_assert(SINGLE_LAUNCH || cukit::kCountsFit, "a thread writes at most one word of counts");
constexpr unsigned kRemoved = 0;  // below every key

constexpr bool kSoftmax = cukit::kScoring == cukit::Scoring::Softmax;
// Whether the softmax's sum is computed. Renormalised softmax weights do not depend on it.
constexpr bool kNeedsSum = LOSSES || (kSoftmax && (BIASED || !RENORMALIZE));

// A chosen expert, passed through shared memory to the lane of the choice.
struct Chosen {
  unsigned key;
  int expert;
};

// How a lane finds the best of its remaining experts; among equal ones the lowest index. Up to 8
// experts per lane are sorted once, which halves the instructions of a choice; with more, each
// choice searches for the best.
enum class Search { Packed, Sorted, Scan };
constexpr Search kSearch = kPerLane <= 4   ? Search::Packed
                           : kPerLane <= 8 ? Search::Sorted
                                           : Search::Scan;

// A lane's remaining experts: sorted keys, and the experts in the bytes of a word, the best in the
// lowest byte.
template <Search Kind>
struct Candidates {
  CUKIT_DEVICE explicit Candidates(const unsigned (&all)[kPerLane]) {
    static_assert(Kind == Search::Packed && BINS <= 256, "an expert in a byte");
    packed = threadIdx.x % kWarpSize * kPerLane * 0x01010101u + 0x03020100u;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) keys[j] = all[j];
#pragma unroll
    for (int round = 0; round < kPerLane; ++round)
#pragma unroll
      for (int j = round % 2; j + 1 < kPerLane; j += 2) {
        const bool exchanged = keys[j + 1] > keys[j];
        const unsigned larger = max(keys[j], keys[j + 1]);
        keys[j + 1] = min(keys[j], keys[j + 1]);
        keys[j] = larger;
        const unsigned swapped = __byte_perm(packed, 0, j == 0 ? 0x3201 : j == 1 ? 0x3120 : 0x2310);
        packed = exchanged ? swapped : packed;
      }
  }

  CUKIT_DEVICE Chosen best() const { return {keys[0], static_cast<int>(packed)}; }
  CUKIT_DEVICE static int expert_of(const Chosen& chosen) { return chosen.expert & 0xff; }

  CUKIT_DEVICE void remove_best() {
#pragma unroll
    for (int j = 0; j + 1 < kPerLane; ++j) keys[j] = keys[j + 1];
    keys[kPerLane - 1] = kRemoved;
    packed >>= 8;
  }

 private:
  unsigned keys[kPerLane];
  unsigned packed;
};

// The same as sorted pairs of key and expert.
template <>
struct Candidates<Search::Sorted> {
  CUKIT_DEVICE explicit Candidates(const unsigned (&keys)[kPerLane]) {
    const int first_expert = threadIdx.x % kWarpSize * kPerLane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sorted[j] = {keys[j], first_expert + j};
#pragma unroll
    for (int round = 0; round < kPerLane; ++round)
#pragma unroll
      for (int j = round % 2; j + 1 < kPerLane; j += 2) put_in_order(sorted[j], sorted[j + 1]);
  }

  CUKIT_DEVICE const Chosen& best() const { return sorted[0]; }
  CUKIT_DEVICE static int expert_of(const Chosen& chosen) { return chosen.expert; }

  CUKIT_DEVICE void remove_best() {
#pragma unroll
    for (int j = 0; j + 1 < kPerLane; ++j) sorted[j] = sorted[j + 1];
    sorted[kPerLane - 1].key = kRemoved;
  }

 private:
  Chosen sorted[kPerLane];

  CUKIT_DEVICE static void put_in_order(Chosen& a, Chosen& b) {
    const bool exchanged = b.key > a.key;
    const Chosen first = exchanged ? b : a;
    b = exchanged ? a : b;
    a = first;
  }
};

// Unsorted keys: each choice searches for the best.
template <>
struct Candidates<Search::Scan> {
  CUKIT_DEVICE explicit Candidates(const unsigned (&all)[kPerLane]) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) keys[j] = all[j];
    find();
  }

  CUKIT_DEVICE const Chosen& best() const { return found; }
  CUKIT_DEVICE static int expert_of(const Chosen& chosen) { return chosen.expert; }

  CUKIT_DEVICE void remove_best() {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (found.expert % kPerLane == j) keys[j] = kRemoved;
    }
    find();
  }

 private:
  Chosen found;
  unsigned keys[kPerLane];

  CUKIT_DEVICE void find() {
    found = {kRemoved, 0};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (keys[j] > found.key) {
        found = {keys[j], static_cast<int>(threadIdx.x) % kWarpSize * kPerLane + j};
      }
    }
  }
};

// Sums over the tokens of a warp, for the losses.
struct TokenSums {
  float probability[kPerLane] = {};  // of each expert of the lane
  float z = 0.0f;

  CUKIT_DEVICE void add(const float (&logits)[kPerLane], const float (&scores)[kPerLane],
                        const cukit::RowSoftmax& softmax) {
    float total = 1.0f;
    if constexpr (!kSoftmax) {
      total = 0.0f;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) total += scores[j];
      total = cukit::nonzero(cukit::warp_reduce<cukit::Sum>(total));
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) probability[j] += scores[j] / total;
    const float log_sum_exp = softmax.log_sum_exp();
    z += log_sum_exp * log_sum_exp;
  }
};

// A token's choices: lane s holds choice s, for s < top_k.
struct Choice {
  int expert = 0;
  float score = 0.0f;
};

CUKIT_DEVICE bool has_nan(const float (&logits)[kPerLane]) {
  bool found = false;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) found = found || logits[j] != logits[j];
  return found;
}

CUKIT_DEVICE Choice choose(const float (&logits)[kPerLane], const float (&scores)[kPerLane],
                           const cukit::RowSoftmax& softmax, const float* bias,
                           const cukit::RoutingParameters& p) {
  __shared__ Chosen chosen[kWarps][kWarpSize];
  Chosen* const own = chosen[threadIdx.x / kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  unsigned keys[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int expert = lane * kPerLane + j;
    const bool exists = expert < p.num_experts;
    const float ranked = BIASED ? scores[j] + (exists ? bias[expert] : 0.0f) + 0.0f : logits[j];
    keys[j] = exists ? cukit::rank_key(ranked) : kRemoved;
  }
  Candidates<kSearch> candidates(keys);
  for (int slot = 0; slot < p.top_k; ++slot) {
    const unsigned key = __reduce_max_sync(kFullMask, candidates.best().key);
    const bool has_it = candidates.best().key == key;
    const unsigned holders = __ballot_sync(kFullMask, has_it);
    if (has_it && (holders & ((1u << lane) - 1)) == 0) {  // the lowest lane has the lowest expert
      own[slot] = candidates.best();
      candidates.remove_best();
    }
  }
  __syncwarp();
  Choice choice;
  if (lane < p.top_k) {
    choice = {candidates.expert_of(own[lane]), cukit::ranked_value(own[lane].key)};
  }
  __syncwarp();  // `own` is reused for the next token
  if constexpr (BIASED) {
    // The ranked value includes the bias: fetch the score from the lane that holds it.
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float score = __shfl_sync(kFullMask, scores[j], choice.expert / kPerLane);
      if (choice.expert % kPerLane == j) choice.score = score;
    }
  } else if constexpr (kSoftmax) {
    choice.score = kNeedsSum ? softmax.probability(choice.score) : softmax.relative(choice.score);
  } else {
    choice.score = cukit::sigmoid(choice.score);
  }
  if (lane >= p.top_k) choice.score = 0.0f;
  if constexpr (RENORMALIZE) {
    float total = cukit::nonzero(cukit::warp_reduce<cukit::Sum>(choice.score));
    if constexpr (kSoftmax && !kNeedsSum) {
      if (__any_sync(kFullMask, has_nan(logits))) total = __uint_as_float(0x7fffffffu);
    }
    choice.score /= total;
  }
  return choice;
}

// Adds the warps' sums in a fixed order and writes them to into[num_experts + 1]. Called by all
// threads; `scratch` holds kWarps * BINS floats.
CUKIT_DEVICE void write_sums(float* into, const TokenSums& sums, float* scratch, int num_experts) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  __shared__ float z[kWarps];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    scratch[warp * BINS + lane * kPerLane + j] = sums.probability[j];
  }
  if (lane == 0) z[warp] = sums.z;
  __syncthreads();
  for (int column = threadIdx.x; column <= num_experts; column += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += column < num_experts ? scratch[w * BINS + column] : z[w];
    }
    into[column] = sum;
  }
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_router(
    const T* __restrict__ logits,    // [num_tokens, num_experts]
    const float* __restrict__ bias,  // [num_experts], with BIASED
    float* weights,                  // [num_tokens, top_k]
    int* experts,                    // [num_tokens, top_k]
    cukit::CountWord* chunk_counts,  // [chunks, ceil(num_experts / 4)], without SINGLE_LAUNCH
    float* chunk_sums,               // [chunks, num_experts + 1], with LOSSES
    int* __restrict__ rows,          // [num_tokens, top_k], with SINGLE_LAUNCH
    int* __restrict__ counts,        // [num_experts], with SINGLE_LAUNCH
    int* __restrict__ offsets,       // [num_experts + 1], with SINGLE_LAUNCH
    float* __restrict__ losses,      // [2]: balance, z; with SINGLE_LAUNCH and LOSSES
    const __grid_constant__ cukit::RoutingParameters p) {
  __shared__ cukit::OrderTables tables;
  __shared__ int chosen[SINGLE_LAUNCH ? MAX_CHOICES : 1];
  const int lane = threadIdx.x % kWarpSize;
  const cukit::Choices choices(p, blockIdx.x);
  const auto logits_of = [&](int token) {
    return logits + static_cast<long long>(choices.first_token + token) * p.num_experts;
  };
  int token = threadIdx.x / kWarpSize;
  cukit::LogitRow<T> next;
  if (token < choices.tokens) next.load(logits_of(token), p.num_experts);
  cukit::clear_bins(tables.others);
  if constexpr (SINGLE_LAUNCH) cukit::clear_bins(tables.earlier);
  if constexpr (SINGLE_LAUNCH) {
    __syncthreads();
  } else {
    cukit::release_order(chunk_counts, experts, choices, p);
  }

  TokenSums sums;
  while (token < choices.tokens) {
    float row[kPerLane], scores[kPerLane];
    next.convert(row, p.num_experts);
    const cukit::RowSoftmax softmax(row, kNeedsSum);
    if constexpr (BIASED || LOSSES) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        scores[j] = kSoftmax ? softmax.probability(row[j]) : cukit::sigmoid(row[j]);
      }
    }
    if constexpr (LOSSES) sums.add(row, scores, softmax);
    const Choice choice = choose(row, scores, softmax, bias, p);
    if (lane < p.top_k) {
      const int i = token * p.top_k + lane;
      weights[choices.first + i] = choice.score;
      cukit::store_relaxed(experts + choices.first + i, choice.expert);
      if constexpr (SINGLE_LAUNCH) chosen[i] = choice.expert;
      atomicAdd(&tables.others[choice.expert], 1);
    }
    token += kWarps;
    if (token < choices.tokens) next.load(logits_of(token), p.num_experts);
  }

  if constexpr (LOSSES) {
    write_sums(chunk_sums + blockIdx.x * (p.num_experts + 1), sums,
               reinterpret_cast<float*>(tables.ranks), p.num_experts);
  }
  __syncthreads();
  if constexpr (SINGLE_LAUNCH) {
    if constexpr (LOSSES) {
      cukit::write_losses(losses, tables.others, chunk_sums, 1, p,
                          reinterpret_cast<float*>(tables.ranks));
    }
    const cukit::OrderResult result{rows, counts, offsets, weights};
    for (int i = threadIdx.x; i < max(choices.warps, 1) * BINS; i += THREADS) tables.ranks[i] = 0;
    __syncthreads();
    const cukit::FirstChoice first =
        cukit::count_warps<false>(tables, chosen, choices, p.num_experts);
    __syncthreads();
    cukit::rank_warps(tables, choices, p.num_experts);
    cukit::scan_tables(tables, result, p, true);
    cukit::place_choices(tables, chosen, choices, p, result, first);
  } else {
    cukit::write_counts(chunk_counts, tables.others, p.num_experts);
  }
}
