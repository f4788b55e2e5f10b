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
//   choice takes one maximum over the warp, of the logits as ordered integers, and a ballot. WHOLE:
//   the grid is one block, which also orders the choices; otherwise order_experts.cu orders them
//   from `chunk_counts`, and its blocks may already be resident on the same SMs.
// Shared memory: 4 * BINS * (THREADS / 32 + 1) + 8 * THREADS bytes, with WHOLE 4 * MOST_CHOICES
//   more; static.
// Macros: router_scores.cuh; expert_order.cuh; RENORMALIZE, BIASED, LOSSES, WHOLE 0|1;
//   BLOCKS_PER_SM 1|2 (2 leaves registers for a block of order_experts); MOST_CHOICES, an upper
//   bound of num_tokens * top_k with WHOLE. top_k is at most 32. Minimum architecture: sm_80.
//   Computes in float; deterministic.
// Reference: cukit/reference/moe.py, topk_router.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
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

constexpr unsigned kTaken = 0;  // below every key
constexpr unsigned kNotANumber = 1;
constexpr int kMostSorted = 8;  // experts per lane

// An order-preserving unsigned key; NaN is the smallest.
CUKIT_DEVICE unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? kNotANumber : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

CUKIT_DEVICE float number_of(unsigned key) {
  if (key == kNotANumber) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A chosen expert, passed through shared memory to the lane of the choice.
struct Chosen {
  unsigned key;
  int expert;
};

// A lane's remaining experts and the best of them; among equal ones the lowest index. A few experts
// are sorted once, which halves the instructions of a choice; with many, each choice searches for
// the best.
template <bool Sorted>
struct Left {
  CUKIT_DEVICE explicit Left(const unsigned (&keys)[kPerLane]) {
    const int first_expert = threadIdx.x % kWarpSize * kPerLane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sorted[j] = {keys[j], first_expert + j};
#pragma unroll
    for (int round = 0; round < kPerLane; ++round)
#pragma unroll
      for (int j = round % 2; j + 1 < kPerLane; j += 2) put_in_order(sorted[j], sorted[j + 1]);
  }

  CUKIT_DEVICE const Chosen& best() const { return sorted[0]; }

  CUKIT_DEVICE void take_best() {
#pragma unroll
    for (int j = 0; j + 1 < kPerLane; ++j) sorted[j] = sorted[j + 1];
    sorted[kPerLane - 1].key = kTaken;
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

template <>
struct Left<false> {
  CUKIT_DEVICE explicit Left(const unsigned (&all)[kPerLane]) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) keys[j] = all[j];
    find();
  }

  CUKIT_DEVICE const Chosen& best() const { return found; }

  CUKIT_DEVICE void take_best() {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (found.expert % kPerLane == j) keys[j] = kTaken;
    }
    find();
  }

 private:
  Chosen found;
  unsigned keys[kPerLane];

  CUKIT_DEVICE void find() {
    found = {kTaken, 0};
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (keys[j] > found.key) {
        found = {keys[j], static_cast<int>(threadIdx.x) % kWarpSize * kPerLane + j};
      }
    }
  }
};

// Sums over the tokens of a warp.
struct TokenSums {
  float probability[kPerLane] = {};  // of each expert of the lane
  float z = 0.0f;

  CUKIT_DEVICE void add(const float (&logits)[kPerLane], const float (&scores)[kPerLane],
                        const cukit::RowSoftmax& softmax) {
    float total = 1.0f;
    if constexpr (cukit::kScoring == cukit::Scoring::Sigmoid) {
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
    keys[j] = exists ? key_of(ranked) : kTaken;
  }
  Left<(kPerLane <= kMostSorted)> left(keys);
  for (int slot = 0; slot < p.top_k; ++slot) {
    const unsigned key = __reduce_max_sync(kFullMask, left.best().key);
    const bool has_it = left.best().key == key;
    const unsigned holders = __ballot_sync(kFullMask, has_it);
    if (has_it && (holders & ((1u << lane) - 1)) == 0) {  // the lowest lane has the lowest expert
      own[slot] = left.best();
      left.take_best();
    }
  }
  __syncwarp();
  Choice choice;
  if (lane < p.top_k) choice = {own[lane].expert, number_of(own[lane].key)};
  __syncwarp();  // `own` is reused for the next token
  if constexpr (BIASED) {
    // The ranked value includes the bias: fetch the score from the lane that holds it.
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float score = __shfl_sync(kFullMask, scores[j], choice.expert / kPerLane);
      if (choice.expert % kPerLane == j) choice.score = score;
    }
  } else if constexpr (cukit::kScoring == cukit::Scoring::Softmax) {
    choice.score = softmax.probability(choice.score);
  } else {
    choice.score = cukit::sigmoid(choice.score);
  }
  if (lane >= p.top_k) choice.score = 0.0f;
  if constexpr (RENORMALIZE) {
    choice.score /= cukit::nonzero(cukit::warp_reduce<cukit::Sum>(choice.score));
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
    unsigned short* __restrict__ chunk_counts,  // [chunks, num_experts], without WHOLE
    float* chunk_sums,               // [chunks, num_experts + 1], with LOSSES
    int* __restrict__ rows,          // [num_tokens, top_k], with WHOLE
    int* __restrict__ counts,        // [num_experts], with WHOLE
    int* __restrict__ offsets,       // [num_experts + 1], with WHOLE
    float* __restrict__ losses,      // [2]: balance, z; with WHOLE and LOSSES
    const __grid_constant__ cukit::RoutingParameters p) {
  __shared__ cukit::OrderTables tables;
  __shared__ int chosen[WHOLE ? MOST_CHOICES : 1];
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (!WHOLE) cukit::release_next_grid();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) tables.totals[bin] = 0;
  __syncthreads();

  TokenSums sums;
  const int end = min((static_cast<int>(blockIdx.x) + 1) * p.chunk, p.num_tokens);
  for (int token = blockIdx.x * p.chunk + threadIdx.x / kWarpSize; token < end; token += kWarps) {
    float row[kPerLane], scores[kPerLane];
    cukit::load_logits(row, logits + static_cast<long long>(token) * p.num_experts, p.num_experts);
    const cukit::RowSoftmax softmax(row);
    if constexpr (BIASED || LOSSES) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        scores[j] = cukit::kScoring == cukit::Scoring::Softmax ? softmax.probability(row[j])
                                                               : cukit::sigmoid(row[j]);
      }
    }
    if constexpr (LOSSES) sums.add(row, scores, softmax);
    const Choice choice = choose(row, scores, softmax, bias, p);
    if (lane < p.top_k) {
      const int at = token * p.top_k + lane;
      weights[at] = choice.score;
      experts[at] = choice.expert;
      if constexpr (WHOLE) chosen[at] = choice.expert;
      atomicAdd(&tables.totals[choice.expert], 1);
    }
  }

  if constexpr (LOSSES) {
    write_sums(chunk_sums + blockIdx.x * (p.num_experts + 1), sums,
               reinterpret_cast<float*>(tables.ranks), p.num_experts);
  }
  __syncthreads();
  if constexpr (WHOLE) {
    if constexpr (LOSSES) {
      cukit::write_losses(losses, tables.totals, chunk_sums, 1, p,
                          reinterpret_cast<float*>(tables.ranks));
    }
    const cukit::OrderResult result{rows, counts, offsets, weights};
    const cukit::Choices choices(p, 0);
    for (int i = threadIdx.x; i < max(choices.warps, 1) * BINS; i += THREADS) tables.ranks[i] = 0;
    __syncthreads();
    const int first = cukit::first_expert(chosen, choices);
    cukit::count_warps(tables, chosen, choices, p.num_experts, first);
    __syncthreads();
    cukit::scan_tables(tables, choices, result, p.num_experts, true);
    cukit::place_choices(tables, chosen, choices, p, result, first);
  } else {
    for (int bin = threadIdx.x; bin < p.num_experts; bin += THREADS) {
      chunk_counts[blockIdx.x * p.num_experts + bin] = tables.totals[bin];
    }
  }
}
