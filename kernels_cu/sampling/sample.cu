// Draws a token from each row of logits, or checks the token that a draft model drew.
//
//   weight(v) = floor(2^42 exp((z_v - max z) / temperature)), z: logits lowered by penalties
//   kept: the top_k first tokens; of these the fewest that weigh top_p of them together, the one that
//     crosses top_p included; of these those with weight >= min_p times the largest
//   token = the first v, in order of tokens, with sum_{u <= v, kept} weight(u) > uniform * sum_{kept} weight
//
// Tokens with equal logits are ordered by token, the lowest first; temperature 0 is top_k = 1. Sums are
// integers: the same token from the same seed however many threads, blocks or GPUs share the rows. Random
// numbers: philox.cuh, streams below. The distribution of weights is exact to 2^-42 of the largest.
// Papers: Fan et al., arXiv:1805.04833 (top-k); Holtzman et al., arXiv:1904.09751 (top-p); Nguyen et al.,
// arXiv:2407.01082 (min-p); Leviathan et al., arXiv:2211.17192 (drafts).
//
// Mapping: a cluster a row (row.cuh). A row is read once, where it is resident. Small top_k and the listed
//   log-probabilities: each thread's largest logit bounds the top_k-th largest; block 0 collects what lies
//   above the bound, 1024 tokens at most, sorts it and draws. Otherwise the cut is found by select.cuh and
//   all threads add their weights up for the draw.
// Shared memory: kWorkspaceBytes + RESIDENT * 4 * iterations * THREADS * VEC bytes, dynamic.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS; CLUSTER 1|2|4|8 (above 1: sm_90); RESIDENT 0|1;
//   PENALIZED 0|1; VERIFY 0|1: check drafts; BLOCKS_PER_SM. Minimum architecture: sm_80.
// Reference: cukit/reference/sampling.py, sample and speculative_verify.
#include "common/platform.cuh"
#include "common/philox.cuh"
#include "sampling/select.cuh"

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

constexpr unsigned kDraw = 0, kAccept = 1, kResample = 2;  // streams
constexpr int kListed = 512;  // top_k up to here is taken from a sorted list

// Of one request, from arrays where there are any.
struct Options {
  float slope;
  int top_k;  // 0: all
  float top_p;
  uint64 least_weight;
  uint64 seed, step;
  bool valid;
};

template <typename V>
CUKIT_DEVICE V option(const V* values, int request, V otherwise) {
  return values == nullptr ? otherwise : values[request];
}

// The results of the row, written by the threads that find them.
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

// Sum of weights before a thread's own tokens, and of all; draws the token at `place` of the sum.
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

// Cuts the sorted list of block 0 to what is kept, and draws from it.
template <typename Winner>
CUKIT_DEVICE void draw_from_list(Workspace& space, const Selection& selection, int count,
                                 const Options& options, uint64 uniform, const Winner& winner) {
  constexpr int kPer = cukit::kMost / THREADS;
  uint64* by_token = reinterpret_cast<uint64*>(space.bins[0]);
  uint64* weights = reinterpret_cast<uint64*>(space.bins[1]);
  const int ranked = min(count, options.top_k);
  uint64 own[kPer], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    own[j] = 0;
    if (at < ranked) {
      own[j] = selection.scaled(cukit::logit_of(static_cast<unsigned>(space.list[at] >> 32))).weight();
    }
    sum += own[j];
  }
  uint64 before = cukit::block_scan(sum, total, space.scans);
  const uint64 target = options.top_p < 1.0f ? cukit::part_of(total, options.top_p) : total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    const bool kept = at < ranked && before < target && own[j] >= options.least_weight;
    if (at < count) {
      weights[at] = own[j];
      by_token[at] = kept ? space.list[at] << 32 | static_cast<unsigned>(at) : cukit::kNoRank;
    }
    before += own[j];
  }
  cukit::sort_list(by_token, count);
  sum = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    const uint64 entry = at < count ? by_token[at] : cukit::kNoRank;
    own[j] = entry == cukit::kNoRank ? 0 : weights[static_cast<unsigned>(entry)];
    sum += own[j];
  }
  before = cukit::block_scan(sum, total, space.scans);
  const uint64 place = __umul64hi(uniform, total);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (before <= place && place < before + own[j]) {
      const uint64 entry = by_token[threadIdx.x * kPer + j];
      const uint64 rank = space.list[static_cast<unsigned>(entry)];
      winner(cukit::logit_of(static_cast<unsigned>(rank >> 32)), static_cast<int>(entry >> 32));
    }
    before += own[j];
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
    const float* __restrict__ temperature,  // [requests] or null, as all up to step
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
    int* tokens,                            // [num_rows]; -1: refused
    float* logprobs,                        // [num_rows]
    int* top_tokens,                        // [num_rows, top_n]
    float* top_logprobs,                    // [num_rows, top_n]
    int* accepted,                          // [num_rows], with VERIFY: 1, 0, or -1: refused
    const __grid_constant__ SampleParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  Workspace& space = *reinterpret_cast<Workspace*>(memory);
  float* values = reinterpret_cast<float*>(memory + cukit::kWorkspaceBytes);
  for (int b = threadIdx.x; b < cukit::kBins; b += THREADS) space.bins[0][b] = space.bins[1][b] = 0;
  if (threadIdx.x == 0) space.cursor = 0;

  const int number = static_cast<int>(blockIdx.x) / CLUSTER;
  const int request = number / p.rows_per_request;
  const int turn = number % p.rows_per_request;
  const Results results{tokens + number, logprobs + number,
                        top_tokens + static_cast<long long>(number) * p.top_n,
                        top_logprobs + static_cast<long long>(number) * p.top_n, accepted + number};

  Options options;
  const float heat = option(temperature, request, p.temperature);
  const int k = option(top_k, request, p.top_k);
  const float part = option(min_p, request, p.min_p);
  options.top_p = option(top_p, request, p.top_p);
  options.valid = heat >= 0.0f && heat < cukit::infinity() && k >= 0 && options.top_p >= 0.0f && part <= 1.0f && part >= 0.0f;
  // In (0, infinity), so that slope * infinity is infinity and slope * 0 is 0.
  options.slope =
      heat > 0.0f ? fminf(fmaxf(cukit::kLog2E / heat, 1.2e-38f), 3.0e38f) : cukit::kLog2E;
  options.top_k = heat > 0.0f ? k >= p.vocab_size ? 0 : k : 1;
  options.least_weight = cukit::part_of(1ull << cukit::kScale, fminf(part, 1.0f));
  options.seed = seed == nullptr ? p.seed + request : static_cast<uint64>(seed[request]);
  options.step = (step == nullptr ? p.step : static_cast<uint64>(step[request])) + turn;

  Team team(space.team);
  cukit::Penalties penalties{};
  if constexpr (PENALIZED) {
    penalties = {counts + static_cast<long long>(request) * p.vocab_size,
                 option(repetition, request, p.repetition_penalty),
                 option(presence, request, p.presence_penalty),
                 option(frequency, request, p.frequency_penalty)};
  }
  Row row(logits + static_cast<long long>(number) * p.vocab_size, penalties, values, team.rank(), p);
  const unsigned own = row.read();
  const unsigned least = team.least(own);
  // NaN and infinity come first; nothing but -infinity last.
  if (!options.valid || least <= cukit::descending_key(cukit::infinity()) ||
      least >= cukit::descending_key(-cukit::infinity())) {
    if (team.leads()) refuse(results, p);
    return;
  }
  const float largest = cukit::logit_of(least);
  Selection selection(team, row, space, largest, options.slope);

  // Log-probabilities are those of the whole vocabulary.
  uint64 all_weights = 0;
  const auto logprob_of = [&](float x) {
    return -((largest - x) * options.slope) * cukit::kLn2 - log_of(all_weights);
  };
  const auto drawn = [&](float x, int token) {
    *results.token = token;
    if (p.logprobs) *results.logprob = logprob_of(x);
  };

  const bool short_list = options.top_k > 0 && options.top_k <= kListed;
  const int want = max(short_list && !VERIFY ? options.top_k : 0, p.top_n);
  if (want > 0) {
    int count = selection.collect_best(want, own, p.logprobs != 0, all_weights);
    if (count > cukit::kMost) {
      const Cut cut = selection.cut<By::Count>(want, 0.0f, Cut());
      count = selection.collect(cut);
    }
    if (team.leads()) {
      cukit::sort_list(space.list, count);
      for (int i = threadIdx.x; i < p.top_n; i += THREADS) {
        const uint64 rank = space.list[i];
        results.top_tokens[i] = static_cast<int>(static_cast<unsigned>(rank));
        results.top_logprobs[i] = logprob_of(cukit::logit_of(static_cast<unsigned>(rank >> 32)));
      }
    }
    if (short_list && !VERIFY) {
      if (!team.leads()) return;
      const uint64 uniform = cukit::philox_uint64(options.seed, options.step, kDraw);
      draw_from_list(space, selection, count, options, uniform, drawn);
      return;
    }
  }

  Cut cut;
  if (options.top_k > 0) cut = selection.cut<By::Count>(options.top_k, 0.0f, cut);
  if (options.top_p < 1.0f) cut = selection.cut<By::Weight>(0, options.top_p, cut);
  const auto weight_of = [&](float x, int column) -> uint64 {
    if (!cut.keeps(x, column)) return 0;
    const uint64 weight = selection.scaled(x).weight();
    return weight >= options.least_weight ? weight : 0;
  };
  const auto sum_of = [&](const auto& weigh) {
    uint64 sum = 0;
    row.each([&](float x, int column) { sum += weigh(x, column); });
    return team.sum(sum);
  };
  if (p.logprobs && all_weights == 0) {
    all_weights = sum_of([&](float x, int) { return selection.scaled(x).weight(); }).total;
  }
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
      const uint64 bits = cukit::philox_uint64(options.seed, options.step, kAccept);
      const double uniform = static_cast<double>(bits >> 11) * 1.1102230246251565e-16;  // 2^-53
      const bool accept =
          uniform * expected * static_cast<double>(kept.total) < static_cast<double>(weight);
      const bool writes = team.leads() && threadIdx.x == 0;
      if (writes) *results.accepted = accept;
      if (accept) {
        if (writes) drawn(row.at(draft), draft);
        return;
      }
      // What the target has more of than the draft.
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
        const uint64 uniform_bits = cukit::philox_uint64(options.seed, options.step, stream);
        find_token(row, left, __umul64hi(uniform_bits, left.total), excess, drawn);
        return;
      }
    } else if (team.leads() && threadIdx.x == 0) {
      *results.accepted = 0;
    }
  }
  const uint64 uniform = cukit::philox_uint64(options.seed, options.step, stream);
  find_token(row, kept, __umul64hi(uniform, kept.total), weight_of, drawn);
}
