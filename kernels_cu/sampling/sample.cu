// Samples a token from each row of logits, or verifies a draft model's tokens (speculative decoding).
//
//   weight(v) = floor(2^42 exp((z_v - max z) / temperature)), z: logits after the penalties
//   kept: the top_k most likely tokens; of these the fewest, most likely first, with at least top_p of their
//     total weight; of these the tokens with weight >= min_p times the largest
//   token = the smallest token id v with sum_{u <= v, kept} weight(u) > uniform * sum_{kept} weight
//
// Equal logits rank by token id, lowest first; temperature 0 is top_k = 1. Weights are summed as
// integers, so a seed yields the same token however rows are distributed over threads, blocks or GPUs. Weights
// have 24 significant bits and a resolution of 2^-42 of the largest. Random numbers: common/philox.cuh.
// Papers: Fan et al., arXiv:1805.04833 (top-k); Holtzman et al., arXiv:1904.09751 (top-p); Nguyen et al.,
// arXiv:2407.01082 (min-p); Leviathan et al., arXiv:2211.17192 (drafts).
//
// Mapping: one cluster per row (row.cuh). A resident row is read from global memory once. If top_k and top_n
//   are at most 128, one pass over the row finds these tokens (best.cuh); a top_k up to 512 is drawn from block
//   0's sorted list (select.cuh). Otherwise select.cuh finds the cut, and all threads sum the kept weights.
// Shared memory, dynamic: kWorkspaceBytes + the larger of RESIDENT * 4 * iterations * THREADS * VEC bytes and
//   STREAMED * 8 * ceil(ceil(atoms / CLUSTER) / warps) * THREADS bytes.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS; CLUSTER 1|2|4|8 (above 1: sm_90); RESIDENT 0|1;
//   PENALIZED 0|1; VERIFY 0|1: verify drafts; ATOM: row.cuh; STREAMED 0|1: with best.cuh; BLOCKS_PER_SM.
//   Minimum architecture: sm_80.
// Reference: cukit/reference/sampling.py, sample and speculative_verify.
#include "common/platform.cuh"
#include "common/philox.cuh"
#include "sampling/best.cuh"

namespace {

using cukit::By;
using cukit::Cut;
using cukit::Row;
using cukit::SampleParameters;
using cukit::Scaled;
using cukit::Selection;
using cukit::Team;
using cukit::uint64;
using cukit::Workspace;
using T = cukit::element_t;

constexpr unsigned kDraw = 0, kAccept = 1, kResample = 2;  // random streams
constexpr int kListed = 512;  // largest top_k drawn from a sorted list

template <typename V>
CUKIT_DEVICE V option(const V* values, int request, V otherwise) {
  return values == nullptr ? otherwise : values[request];
}

// Truncation and random numbers of a row.
struct Draw {
  float top_p;
  uint64 least_weight;
  uint64 seed, step;

  CUKIT_DEVICE uint64 uniform(unsigned stream) const {
    return cukit::philox_uint64(seed, step, stream);
  }
};

// Where the results of a row are written.
struct Results {
  int* token;
  float* logprob;        // with p.logprobs
  int* top_tokens;       // [top_n]
  float* top_logprobs;   // [top_n]
  int* accepted;         // with VERIFY
};

CUKIT_DEVICE float log_of(uint64 weights) {
  return cukit::kLn2 * (log2f(static_cast<float>(weights)) - static_cast<float>(cukit::kScale));
}

// Calls winner(logit, token) for the token whose interval in the prefix sum of weights contains `place`.
template <typename WeightOf, typename Winner>
CUKIT_DEVICE void find_token(const Row& row, const Team::Sum& sum, uint64 place,
                             const WeightOf& weight_of, const Winner& winner) {
  if (place < sum.before) return;
  uint64 before = sum.before;
#pragma unroll 1
  for (int i = 0; i < row.iterations(); ++i) {
    float x[VEC];
    row.fetch(x, i);
    uint64 own = 0;
#pragma unroll
    for (int j = 0; j < VEC; ++j) own += weight_of(x[j], row.column(i) + j);
    const uint64 upto = cukit::warp_scan(own);
    uint64 mine = before + upto - own;
    if (mine <= place && place < mine + own) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const uint64 weight = weight_of(x[j], row.column(i) + j);
        if (mine <= place && place < mine + weight) winner(x[j], row.column(i) + j);
        mine += weight;
      }
    }
    before += __shfl_sync(cukit::kFullMask, upto, cukit::kWarpSize - 1);
    if (before > place) return;
  }
}

// Applies top_p and min_p to the first `ranked` entries of a sorted list, and draws from the kept tokens in
// order of token id. Block 0 only. weights: shared memory for `ranked` values.
template <typename Winner>
CUKIT_DEVICE void draw_from_list(const uint64* list, uint64* weights, uint64* scans,
                                 const Selection& selection, const Draw& draw, int ranked,
                                 const Winner& winner) {
  constexpr int kPer = cukit::kMost / THREADS;
  uint64 own[kPer], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    own[j] = 0;
    if (at < ranked && list[at] != cukit::kNoRank) {
      own[j] = selection.scaled(cukit::logit_of(static_cast<unsigned>(list[at] >> 32))).weight();
    }
    sum += own[j];
  }
  uint64 before = cukit::block_scan(sum, total, scans);
  const uint64 target = draw.top_p < 1.0f ? cukit::part_of(total, draw.top_p) : total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    if (at < ranked) weights[at] = before < target && own[j] >= draw.least_weight ? own[j] : 0;
    before += own[j];
  }
  __syncthreads();
  // kLanes lanes per entry sum the weights of all entries, and of those with a smaller token id.
  constexpr int kLanes = 8;
  const int part = threadIdx.x % kLanes;
  for (int begin = 0; begin < ranked; begin += THREADS / kLanes) {
    const int i = begin + static_cast<int>(threadIdx.x) / kLanes;
    const unsigned token = i < ranked ? static_cast<unsigned>(list[i]) : 0u;
    uint64 lower = 0, kept = 0;
#pragma unroll 2
    for (int j = part; j < ranked; j += kLanes) {
      const uint64 weight = weights[j];
      kept += weight;
      if (static_cast<unsigned>(list[j]) < token) lower += weight;
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      kept += __shfl_xor_sync(cukit::kFullMask, kept, offset);
      lower += __shfl_xor_sync(cukit::kFullMask, lower, offset);
    }
    const uint64 place = __umul64hi(draw.uniform(kDraw), kept);
    if (part == 0 && i < ranked && lower <= place && place < lower + weights[i]) {
      winner(cukit::logit_of(static_cast<unsigned>(list[i] >> 32)), static_cast<int>(token));
    }
  }
}

// Writes the first p.top_n entries of block 0's sorted list.
template <typename LogprobOf>
CUKIT_DEVICE void list_best(const uint64* list, const Results& results, const SampleParameters& p,
                            const LogprobOf& logprob_of) {
  for (int i = threadIdx.x; i < p.top_n; i += THREADS) {
    results.top_tokens[i] = static_cast<int>(static_cast<unsigned>(list[i]));
    results.top_logprobs[i] = logprob_of(cukit::logit_of(static_cast<unsigned>(list[i] >> 32)));
  }
}

CUKIT_DEVICE void refuse(const Results& results, const SampleParameters& p) {
  constexpr unsigned kNan = 0x7fffffffu;
  if (threadIdx.x == 0) {
    *results.token = -1;
    if (p.logprobs) *results.logprob = __uint_as_float(kNan);
    if (VERIFY) *results.accepted = -1;
  }
  for (int i = threadIdx.x; i < p.top_n; i += THREADS) {
    results.top_tokens[i] = -1;
    results.top_logprobs[i] = __uint_as_float(kNan);
  }
}

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, BLOCKS_PER_SM) sample(
    const T* __restrict__ logits,           // [num_rows, vocab_size]
    const int* __restrict__ counts,         // [requests, vocab_size], with PENALIZED: row.cuh
    const float* __restrict__ temperature,  // [requests] or null; so are all arrays up to step
    const int* __restrict__ top_k,
    const float* __restrict__ top_p,
    const float* __restrict__ min_p,
    const float* __restrict__ repetition,
    const float* __restrict__ presence,
    const float* __restrict__ frequency,
    const long long* __restrict__ seed,
    const long long* __restrict__ step,
    const int* __restrict__ drafts,         // [requests, rows_per_request - 1], with VERIFY
    const float* __restrict__ draft_probs,  // [requests, rows_per_request - 1, vocab_size] or null
    int* tokens,                            // [num_rows]; -1: invalid row
    float* logprobs,                        // [num_rows]
    int* top_tokens,                        // [num_rows, top_n]
    float* top_logprobs,                    // [num_rows, top_n]
    int* accepted,                          // [num_rows], with VERIFY: 1, 0, or -1: invalid row
    const __grid_constant__ SampleParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  Workspace& space = *reinterpret_cast<Workspace*>(memory);
  float* values = reinterpret_cast<float*>(memory + cukit::kWorkspaceBytes);
  for (int b = threadIdx.x; b < cukit::kBins; b += THREADS) space.bins[0][b] = space.bins[1][b] = 0;
  if (threadIdx.x == 0) space.cursor = 0;

  const int number = static_cast<int>(blockIdx.x) / CLUSTER;
  const int request = number / p.rows_per_request;
  const int turn = number % p.rows_per_request;
  // Pointers and options are computed where they are used, to save registers while streaming.
  const auto results_of_row = [&] {
    const long long first = static_cast<long long>(number) * p.top_n;
    return Results{tokens + number, logprobs + number, top_tokens + first, top_logprobs + first,
                   accepted + number};
  };
  const auto draw_of_row = [&] {
    Draw draw;
    draw.top_p = option(top_p, request, p.top_p);
    draw.least_weight =
        cukit::part_of(1ull << cukit::kScale, fminf(option(min_p, request, p.min_p), 1.0f));
    draw.seed = seed == nullptr ? p.seed + request : static_cast<uint64>(seed[request]);
    draw.step = (step == nullptr ? p.step : static_cast<uint64>(step[request])) + turn;
    return draw;
  };
  const float heat = option(temperature, request, p.temperature);
  const int k = option(top_k, request, p.top_k);
  const float least_part = option(min_p, request, p.min_p), part = option(top_p, request, p.top_p);
  const bool valid = heat >= 0.0f && heat < cukit::infinity() && k >= 0 && part >= 0.0f &&
                     least_part <= 1.0f && least_part >= 0.0f;
  // Clamped to (0, infinity), so that slope * infinity is infinity and slope * 0 is 0.
  const float slope =
      heat > 0.0f ? fminf(fmaxf(cukit::kLog2E / heat, 1.2e-38f), 3.0e38f) : cukit::kLog2E;
  const int most = heat > 0.0f ? k >= p.vocab_size ? 0 : k : 1;  // 0: no limit

  Team team(space.team);
  cukit::Penalties penalties{};
  if constexpr (PENALIZED) {
    penalties = {counts + static_cast<long long>(request) * p.vocab_size,
                 option(repetition, request, p.repetition_penalty),
                 option(presence, request, p.presence_penalty),
                 option(frequency, request, p.frequency_penalty)};
  }
  Row row(logits + static_cast<long long>(number) * p.vocab_size, penalties, values, team.rank(), p);
  // False for a row with a NaN or +infinity, or of -infinity only, as its smallest key indicates.
  const auto drawable = [&](unsigned least) {
    return valid && least > cukit::descending_key(cukit::infinity()) &&
           least < cukit::descending_key(-cukit::infinity());
  };
  const bool short_list = !VERIFY && most > 0 && most <= kListed;
  const int want = max(short_list ? most : 0, p.top_n);

  if constexpr (STREAMED) {
    if (short_list && want <= cukit::kMostBest && valid) {
      cukit::Best best(team, row, space, reinterpret_cast<cukit::Part*>(values));
      const Team::Gathered all = best.collect(want, p.logprobs != 0, slope);
      if (!drawable(all.least)) {
        if (team.leads()) refuse(results_of_row(), p);
        return;
      }
      if (!all.failed && all.count >= static_cast<unsigned>(p.top_n)) {
        const float largest = cukit::logit_of(all.least);
        const Selection selection(team, row, space, largest, slope);
        const uint64 weights = p.logprobs ? best.total(largest, slope) : 0;
        if (!team.leads()) return;
        const auto logprob_of = [&](float x) {
          return -((largest - x) * slope) * cukit::kLn2 - log_of(weights);
        };
        const uint64* list = best.merged(want);
        const Results results = results_of_row();
        list_best(list, results, p, logprob_of);
        uint64* scratch = CLUSTER > 1 ? space.list : reinterpret_cast<uint64*>(space.bins[0]);
        draw_from_list(list, scratch, space.scans, selection, draw_of_row(), most,
                       [&](float x, int token) {
                         *results.token = token;
                         if (p.logprobs) *results.logprob = logprob_of(x);
                       });
        return;
      }
      __syncthreads();
      for (int b = threadIdx.x; b < cukit::kBins; b += THREADS) space.bins[0][b] = space.bins[1][b] = 0;
      if (threadIdx.x == 0) space.cursor = 0;
      team.sync();
    } else {
      team.wait_for_start();
    }
  } else {
    team.wait_for_start();
  }

  const unsigned own = row.read();
  const unsigned least = team.least(own);
  if (!drawable(least)) {
    if (team.leads()) refuse(results_of_row(), p);
    return;
  }
  const float largest = cukit::logit_of(least);
  Selection selection(team, row, space, largest, slope);

  // Log-probabilities are normalised over the whole vocabulary.
  uint64 all_weights = 0;
  if (p.logprobs) {
    const int warp = static_cast<int>(threadIdx.x) / cukit::kWarpSize;
    const int first = team.rank() * cukit::kWarps + warp;
    all_weights =
        team.sum(row.weigh_atoms(first, CLUSTER * cukit::kWarps, largest, slope)).total;
  }
  const auto logprob_of = [&](float x) {
    return -((largest - x) * slope) * cukit::kLn2 - log_of(all_weights);
  };
  const Results results = results_of_row();
  const Draw draw = draw_of_row();
  const auto drawn = [&](float x, int token) {
    *results.token = token;
    if (p.logprobs) *results.logprob = logprob_of(x);
  };

  if (want > 0) {
    int count = selection.collect_best(want, own);
    if (count > cukit::kMost) {
      const Cut cut = selection.cut<By::Count>(want, 0.0f, Cut());
      count = selection.collect(cut);
    }
    if (team.leads()) {
      cukit::sort_list(space.list, count);
      list_best(space.list, results, p, logprob_of);
    }
    if (short_list) {
      if (!team.leads()) return;
      draw_from_list(space.list, reinterpret_cast<uint64*>(space.bins[0]), space.scans, selection,
                     draw, most, drawn);
      return;
    }
  }

  Cut cut;
  if (most > 0) cut = selection.cut<By::Count>(most, 0.0f, cut);
  if (draw.top_p < 1.0f) cut = selection.cut<By::Weight>(0, draw.top_p, cut);
  const auto weight_of = [&](float x, int column) -> uint64 {
    if (!cut.keeps(x, column)) return 0;
    const uint64 weight = selection.scaled(x).weight();
    return weight >= draw.least_weight ? weight : 0;
  };
  const auto sum_of = [&](const auto& weigh) {
    uint64 sum = 0;
    row.each([&](float x, int column) { sum += weigh(x, column); });
    return team.sum(sum);
  };
  const Team::Sum kept = sum_of(weight_of);

  unsigned stream = kDraw;
  if constexpr (VERIFY) {
    const int num_drafts = p.rows_per_request - 1;
    if (turn < num_drafts) {
      const long long at = static_cast<long long>(request) * num_drafts + turn;
      const int draft = drafts[at];
      const bool exists = draft >= 0 && draft < p.vocab_size;
      const float* draft_row =
          draft_probs == nullptr ? nullptr : draft_probs + at * p.vocab_size;
      const uint64 weight = exists ? weight_of(row.at(draft), draft) : 0;
      const double expected = draft_row == nullptr || !exists ? 1.0 : draft_row[draft];
      const uint64 bits = draw.uniform(kAccept);
      const double uniform = static_cast<double>(bits >> 11) * 1.1102230246251565e-16;  // 2^-53
      const bool accept =
          uniform * expected * static_cast<double>(kept.total) < static_cast<double>(weight);
      const bool writes = team.leads() && threadIdx.x == 0;
      if (writes) *results.accepted = accept;
      if (accept) {
        if (writes) drawn(row.at(draft), draft);
        return;
      }
      // Rejected: resample from the residual max(0, p_target - p_draft).
      stream = kResample;
      const double share = 1.0 / static_cast<double>(kept.total);
      const auto excess = [&](float x, int column) -> uint64 {
        const uint64 weight = weight_of(x, column);
        if (weight == 0 || draft_row == nullptr) return column == draft ? 0 : weight;
        const double more = static_cast<double>(weight) * share - draft_row[column];
        return more > 0.0 ? static_cast<uint64>(more * static_cast<double>(1ull << cukit::kScale)) : 0;
      };
      const Team::Sum left = sum_of(excess);
      if (left.total > 0) {
        const uint64 uniform_bits = draw.uniform(stream);
        find_token(row, left, __umul64hi(uniform_bits, left.total), excess, drawn);
        return;
      }
    } else if (team.leads() && threadIdx.x == 0) {
      *results.accepted = 0;
    }
  }
  const uint64 uniform = draw.uniform(stream);
  find_token(row, kept, __umul64hi(uniform, kept.total), weight_of, drawn);
}
