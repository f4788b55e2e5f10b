// Samples a token from each row of logits, or verifies the tokens of a draft model (speculative
// decoding).
//
//   weight(v) = floor(2^42 exp((z_v - max z) / temperature)), z: logits after the penalties
//   kept: the top_k most likely tokens; of these the fewest, most likely first, with at least top_p
//     of their total weight; of these the tokens with weight >= min_p times the largest
//   token = the smallest token id v with sum_{u <= v, kept} weight(u) > uniform * sum_{kept} weight
//
// Equal logits rank by token id, lowest first; temperature 0 is top_k = 1. Weights are summed as
// integers, so a seed yields the same token for any distribution of rows over threads, blocks or
// GPUs. Weights have 24 significant bits and a resolution of 2^-42 of the largest. Without
// truncation, and for the total weight that log-probabilities and a top_p without top_k refer to,
// weights are computed per atom of 1024 tokens (256 in small vocabularies: _plan.py), relative to
// the atom's largest logit (AtomSum in row.cuh). Random numbers: common/philox.cuh.
// Papers: Fan et al., arXiv:1805.04833 (top-k); Holtzman et al., arXiv:1904.09751 (top-p); Nguyen
// et al., arXiv:2407.01082 (min-p); Leviathan et al., arXiv:2211.17192 (drafts).
//
// Drafts (VERIFIES): each position of a request is a row. A drafted token is accepted with
//   probability min(1, p / q), or replaced by a draw from max(p - q, 0); p: the kept weights /
//   their sum, q: the probabilities of the draft model (draft.cuh).
//
// DRAWS limits the options of all rows. Few: no row needs more than its 128 most likely tokens;
//   All: no row is truncated; Any: no limit.
// Mapping:
//   not RESIDENT: one block per row, which reads the row once if possible: with best.cuh, atoms.cuh
//     or candidates.cuh, depending on DRAWS and on the row's options. If one pass does not suffice,
//     select.cuh reads the row several times. Without truncation, or if candidates.cuh lists only
//     the tokens around the cut, a rejected draft with probabilities takes another pass over the
//     row and over the probabilities.
//   RESIDENT: one cluster per row, which keeps the row in shared memory. select.cuh finds the cut,
//     and all threads sum the kept weights.
// Shared memory, dynamic: kWorkspaceBytes; for each atom of the block 16 bytes, with RESIDENT also
//   4 bytes per token; 8 * capacity bytes.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS; CLUSTER 1|2|4|8 (above 1: sm_90, RESIDENT);
//   RESIDENT 0|1: needs DRAWS Any; PENALIZED 0|1; DRAWS Few|All|Any; VERIFIES 0|1; ATOM: row.cuh;
//   BLOCKS_PER_SM. Minimum architecture: sm_80.
// Reference: cukit/reference/sampling.py, sample and speculative_verify.
#include "common/platform.cuh"
#include "common/philox.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "sampling/best.cuh"
#include "sampling/candidates.cuh"
#include "sampling/draft.cuh"

namespace {

enum class Draws { Few, All, Any };
constexpr Draws kDraws = Draws::DRAWS;
constexpr bool kVerify = VERIFIES;
constexpr bool kStreams = !RESIDENT;
static_assert(!kStreams || CLUSTER == 1, "a block streams a row");
static_assert(!RESIDENT || kDraws == Draws::Any);

using cukit::Atoms;
using cukit::By;
using cukit::Candidates;
using cukit::Cut;
using cukit::Draft;
using cukit::Row;
using cukit::SampleParameters;
using cukit::Scaled;
using cukit::Selection;
using cukit::Streamed;
using cukit::Team;
using cukit::uint64;
using cukit::Workspace;
using T = cukit::element_t;

constexpr unsigned kDraw = 0, kAccept = 1, kResample = 2;  // random streams
constexpr int kListed = 512;  // largest top_k drawn from a sorted list
constexpr int kPer = cukit::kMaxSorted / THREADS;  // entries of a sorted list per thread

template <typename V>
CUKIT_DEVICE V option(const V* values, int request, V otherwise) {
  return values == nullptr ? otherwise : values[request];
}

// Truncation and random numbers of a row.
struct Draw {
  float top_p;
  uint64 min_weight;
  uint64 seed, step;

  CUKIT_DEVICE uint64 uniform(unsigned stream) const {
    return cukit::philox_uint64(seed, step, stream);
  }
};

// The weights of a row's tokens: 0 for those that the cut or min_p excludes; after the rejection of a draft, those of
// max(p - q, 0).
struct Kept {
  float largest, slope;
  Cut cut;
  uint64 min_weight;
  Draft draft{};
  double share = 0.0;  // 1 / the kept weight, if the draft is rejected

  CUKIT_DEVICE void reject(uint64 total) { share = 1.0 / static_cast<double>(total); }
  CUKIT_DEVICE uint64 before_rejection(float x, int column) const {
    const uint64 weight = cut.keeps(x, column) ? Scaled(largest - x, slope).weight() : 0;
    return weight >= min_weight ? weight : 0;
  }
  // The draft's probability of a token, if needed. It can be loaded before the weight is known.
  CUKIT_DEVICE float other(int column) const {
    return kVerify && share > 0.0 ? draft.probability(column) : 0.0f;
  }
  CUKIT_DEVICE uint64 operator()(float x, int column, float q) const {
    const uint64 weight = before_rejection(x, column);
    return kVerify && share > 0.0 ? draft.excess(weight, share, column, q) : weight;
  }
  CUKIT_DEVICE uint64 operator()(float x, int column) const {
    const uint64 weight = before_rejection(x, column);
    return kVerify && share > 0.0 && weight > 0 ? draft.excess(weight, share, column, other(column)) : weight;
  }
};

// Where the results of a row are written.
struct Results {
  int* token;
  float* logprob;        // with p.logprobs
  int* top_tokens;       // [top_n]
  float* top_logprobs;   // [top_n]
  int* accepted;         // with VERIFIES
};

CUKIT_DEVICE float log_of(uint64 weights) {
  return cukit::kLn2 * (log2f(static_cast<float>(weights)) - static_cast<float>(cukit::kScale));
}

// Stores the weights of the first `ranked` entries of a sorted list: 0 for entries that top_p or
// min_p excludes. Only block 0 of a cluster calls this function and those below. weights: shared
// memory for `ranked` values.
CUKIT_DEVICE void weigh_list(const uint64* list, uint64* weights, uint64* scans, float largest, float slope,
                             const Draw& draw, int ranked) {
  uint64 own[kPer], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    own[j] = 0;
    if (at < ranked && list[at] != cukit::kNoRank) {
      own[j] = Scaled(largest - cukit::logit_of(static_cast<unsigned>(list[at] >> 32)), slope).weight();
    }
    sum += own[j];
  }
  uint64 before = cukit::block_scan(sum, total, scans);
  const uint64 target = draw.top_p < 1.0f ? cukit::part_of(total, draw.top_p) : total;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    if (at < ranked) weights[at] = before < target && own[j] >= draw.min_weight ? own[j] : 0;
    before += own[j];
  }
  __syncthreads();
}

// Returns the sum of a list's weights, and the weight of a token.
CUKIT_DEVICE uint64 sum_of_list(const uint64* list, const uint64* weights, int ranked, int token,
                                uint64& of_token) {
  uint64 sum = of_token = 0;
  for (int i = static_cast<int>(threadIdx.x) % cukit::kWarpSize; i < ranked; i += cukit::kWarpSize) {
    sum += weights[i];
    if (static_cast<int>(static_cast<unsigned>(list[i])) == token) of_token = weights[i];
  }
  of_token = cukit::warp_sum(of_token);
  return cukit::warp_sum(sum);
}

// Replaces a list's weights by the weights after the rejection of a draft, unless the new weights
// are all 0.
CUKIT_DEVICE void subtract_draft(const uint64* list, uint64* weights, int ranked, const Draft& draft, uint64 total) {
  const double share = 1.0 / static_cast<double>(total);
  uint64 left[kPer], any = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    left[j] = 0;
    if (at < ranked && weights[at] > 0) {
      const int token = static_cast<int>(static_cast<unsigned>(list[at]));
      left[j] = draft.excess(weights[at], share, token, draft.probability(token));
    }
    any |= left[j];
  }
  if (__syncthreads_or(any != 0) == 0) return;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = threadIdx.x * kPer + j;
    if (at < ranked) weights[at] = left[j];
  }
  __syncthreads();
}

// Draws from a list in order of token id.
template <typename Winner>
CUKIT_DEVICE void draw_from_list(const uint64* list, const uint64* weights, int ranked, uint64 uniform,
                                 const Winner& winner) {
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
    const uint64 place = __umul64hi(uniform, kept);
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

// Writes the results of an invalid row: -1 for tokens, NaN for log-probabilities.
CUKIT_DEVICE void refuse(const Results& results, const SampleParameters& p) {
  constexpr unsigned kNan = 0x7fffffffu;
  if (threadIdx.x == 0) {
    *results.token = -1;
    if (p.logprobs) *results.logprob = __uint_as_float(kNan);
    if (kVerify) *results.accepted = -1;
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
    const float* __restrict__ temperature,  // [requests] or null, as are all arrays up to `step`
    const int* __restrict__ top_k,
    const float* __restrict__ top_p,
    const float* __restrict__ min_p,
    const float* __restrict__ repetition,
    const float* __restrict__ presence,
    const float* __restrict__ frequency,
    const long long* __restrict__ seed,
    const long long* __restrict__ step,
    const int* __restrict__ drafts,         // [requests, rows_per_request - 1], with VERIFIES
    const float* __restrict__ draft_probs,  // [requests, rows_per_request - 1, vocab_size] or null
    int* tokens,                            // [num_rows]; -1: invalid row
    float* logprobs,                        // [num_rows]
    int* top_tokens,                        // [num_rows, top_n]
    float* top_logprobs,                    // [num_rows, top_n]
    int* accepted,                          // [num_rows], with VERIFIES: 1, 0, or -1: invalid row
    const __grid_constant__ SampleParameters p) {
  if constexpr (kVerify) cukit::release_next_grid();
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  Workspace& space = *reinterpret_cast<Workspace*>(memory);
  auto* sums = reinterpret_cast<cukit::AtomSum*>(memory + cukit::kWorkspaceBytes);
  void* values = sums + Row::atoms_per_block(p.vocab_size);
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
    draw.min_weight =
        cukit::part_of(1ull << cukit::kScale, fminf(option(min_p, request, p.min_p), 1.0f));
    draw.seed = seed == nullptr ? p.seed + request : static_cast<uint64>(seed[request]);
    draw.step = (step == nullptr ? p.step : static_cast<uint64>(step[request])) + turn;
    return draw;
  };
  const auto draft_of_row = [&] {
    const long long at = static_cast<long long>(request) * (p.rows_per_request - 1) + turn;
    const int token = drafts[at];
    return Draft{token >= 0 && token < p.vocab_size ? token : -1,
                 draft_probs == nullptr ? nullptr : draft_probs + at * p.vocab_size};
  };
  const float row_temperature = option(temperature, request, p.temperature);
  const int k = option(top_k, request, p.top_k);
  const float row_min_p = option(min_p, request, p.min_p);
  const float row_top_p = option(top_p, request, p.top_p);
  bool valid = row_temperature >= 0.0f && row_temperature < cukit::infinity() && k >= 0 &&
               row_top_p >= 0.0f && row_top_p <= 1.0f && row_min_p <= 1.0f && row_min_p >= 0.0f;
  // Clamped to (0, infinity), so that slope * infinity is infinity and slope * 0 is 0.
  const float slope =
      row_temperature > 0.0f ? fminf(fmaxf(cukit::kLog2E / row_temperature, 1.2e-38f), 3.0e38f)
                             : cukit::kLog2E;
  const int row_top_k = row_temperature > 0.0f ? k >= p.vocab_size ? 0 : k : 1;  // 0: no limit

  Team team(space.team);
  cukit::Penalties penalties{};
  if constexpr (PENALIZED) {
    penalties = {counts + static_cast<long long>(request) * p.vocab_size,
                 option(repetition, request, p.repetition_penalty),
                 option(presence, request, p.presence_penalty),
                 option(frequency, request, p.frequency_penalty)};
    valid = valid && penalties.valid();
  }
  Row row(logits + static_cast<long long>(number) * p.vocab_size, penalties, static_cast<float*>(values),
          team.rank(), p);
  Atoms atoms(team, row, sums);
  const bool truncates = row_top_k > 0 || row_top_p < 1.0f || row_min_p > 0.0f;
  const bool drafting = kVerify && turn < p.rows_per_request - 1;
  const bool weighs = p.logprobs || !truncates || (row_top_k == 0 && row_top_p < 1.0f);
  const bool short_list = row_top_k > 0 && row_top_k <= kListed;
  const int want = max(short_list ? row_top_k : 0, p.top_n);

  float largest = 0.0f;
  uint64 all = 0;  // the weight of the row, if `weighs`
  // Sets `largest`. For an invalid row, writes its results and returns false.
  const auto start = [&](unsigned least) {
    // A NaN or +infinity has a smaller key than any finite logit; -infinity has the largest.
    if (least <= cukit::descending_key(cukit::infinity()) ||
        least >= cukit::descending_key(-cukit::infinity()) || !valid) {
      if (team.is_leader()) refuse(results_of_row(), p);
      return false;
    }
    largest = cukit::logit_of(least);
    if (kVerify && team.is_leader() && threadIdx.x == 0) *results_of_row().accepted = 0;
    return true;
  };
  // Log-probabilities are normalised over the whole vocabulary.
  const auto logprob_of = [&](float x) {
    return -((largest - x) * slope) * cukit::kLn2 - log_of(all);
  };
  const auto drawn = [&](float x, int token) {
    const Results results = results_of_row();
    *results.token = token;
    if (p.logprobs) *results.logprob = logprob_of(x);
  };
  // Returns whether the draft, a token of this weight, is accepted; if so, writes the results.
  const auto accepts = [&](const Draft& draft, uint64 weight, uint64 total) {
    const bool accepted = draft.accepted(weight, total, draw_of_row().uniform(kAccept));
    if (accepted && team.is_leader() && threadIdx.x == 0) {
      const Results results = results_of_row();
      *results.token = draft.token;
      *results.accepted = 1;
    }
    return accepted;
  };
  // Draws from the sorted list of the first `row_top_k` tokens.
  const auto draw_listed = [&](uint64* weights) {
    const Draw draw = draw_of_row();
    weigh_list(space.list, weights, space.scans, largest, slope, draw, row_top_k);
    if (drafting) {
      const Draft draft = draft_of_row();
      uint64 of_draft;
      const uint64 total = sum_of_list(space.list, weights, row_top_k, draft.token, of_draft);
      if (accepts(draft, of_draft, total)) return;
      subtract_draft(space.list, weights, row_top_k, draft, total);
    }
    draw_from_list(space.list, weights, row_top_k, draw.uniform(drafting ? kResample : kDraw),
                   drawn);
  };
  // Writes the most likely tokens, and draws if the first `row_top_k` tokens suffice. count: tokens
  // of block 0's list.
  const auto use_list = [&](int count) {
    if (!team.is_leader()) return;
    cukit::sort_list(space.list, count);
    list_best(space.list, results_of_row(), p, logprob_of);
    if (short_list) draw_listed(reinterpret_cast<uint64*>(space.bins[0]));
  };
  // The last token that top_k and top_p keep. exceeded: all tokens weigh less than top_p requires.
  // target: the weight that top_p requires without top_k.
  const auto cut_of = [&](auto& selection, uint64 target, bool& exceeded) {
    Cut cut;
    exceeded = false;
    if (row_top_k > 0) cut = selection.template cut<By::Count>(row_top_k, -1.0f, cut, exceeded);
    if (row_top_p < 1.0f) {
      cut = selection.template cut<By::Weight>(target, row_top_k > 0 ? row_top_p : -1.0f, cut,
                                               exceeded);
    }
    return cut;
  };
  // Draws from the tokens that a cut and min_p keep, or verifies the draft. source: Atoms or
  // Candidates. rejected: the kept weight if the draft has already been rejected, else 0. Returns
  // the kept weight if the draft is rejected here but the source lacks some of the kept tokens, so
  // that its replacement cannot be drawn here; else 0.
  const auto draw_kept = [&](auto& source, const Cut& cut, uint64 rejected) -> uint64 {
    Kept kept{largest, slope, cut, draw_of_row().min_weight};
    if (drafting) kept.draft = draft_of_row();
    if (rejected > 0) kept.reject(rejected);
#pragma unroll 1
    for (;;) {
      const auto sum = source.sum(kept);
      if (drafting && rejected == 0) {
        const int token = kept.draft.token;
        if (accepts(kept.draft, token < 0 ? 0 : kept(row.at(token), token), sum.total)) return 0;
        rejected = sum.total;
        if (!source.complete()) return rejected;
        kept.reject(rejected);
      } else if (sum.total > 0) {
        const uint64 uniform = draw_of_row().uniform(drafting ? kResample : kDraw);
        source.find(sum, __umul64hi(uniform, sum.total), kept, drawn);
        return 0;
      } else {
        kept.share = 0.0;  // max(p - q, 0) is 0 everywhere: draw from p
      }
    }
  };
  // As draw_kept, without truncation; also sets `all`. Returns the weight of the row if the draft
  // is rejected and has probabilities, so that another pass must draw its replacement; else 0.
  const auto draw_atom = [&]() -> uint64 {
    Team::Sum sum = atoms.total(largest, slope);
    all = sum.total;
    if (drafting) {
      const Draft draft = draft_of_row();
      const float x = draft.token < 0 ? -cukit::infinity() : row.at(draft.token);
      if (accepts(draft, Scaled(largest - x, slope).weight(), all)) return 0;
      if (draft.probs != nullptr) return all;
      if (draft.token >= 0) {
        atoms.exclude(x, draft.token, slope);
        sum = atoms.total(largest, slope);
        if (sum.total == 0) {  // all other tokens have weight 0
          if (team.is_leader() && threadIdx.x == 0) drawn(x, draft.token);
          return 0;
        }
      }
    }
    const uint64 uniform = draw_of_row().uniform(drafting ? kResample : kDraw);
    atoms.draw(sum, __umul64hi(uniform, sum.total), largest, slope, drawn);
    return 0;
  };
  // Reads the row in order; returns the smallest key of this thread's logits.
  const auto read = [&] {
    float top = -cukit::infinity();
    atoms.each<true>([&](int i, int atom, const Row::Atom& vectors, int first, float lane_max) {
      top = cukit::max_nan(top, lane_max);
      if (atom < 0) return;
      if constexpr (RESIDENT) row.keep(i, vectors, first);
      if (weighs) atoms.weigh(atom, vectors, first, lane_max, slope);
    });
    return cukit::descending_key(top + 0.0f);
  };

  Cut cut;              // the last token that top_k and top_p keep
  uint64 rejected = 0;  // the kept weight, once a draft has been rejected: `cut` is known
  unsigned own;         // smallest key of this thread's logits
  if constexpr (kStreams) {
    if (kDraws != Draws::All && short_list && want <= cukit::kMaxBest) {
      cukit::Best best(team, row, space, atoms);
      const Streamed pass = best.collect(want, weighs, slope);
      own = pass.own;
      if (!start(pass.least)) return;
      if (weighs) all = atoms.total(largest, slope).total;
      if (!pass.failed && pass.count >= static_cast<unsigned>(p.top_n)) {
        list_best(space.list, results_of_row(), p, logprob_of);
        draw_listed(reinterpret_cast<uint64*>(space.bins[0]));
        return;
      }
    } else if (kDraws == Draws::All || !(truncates || want > 0)) {
      if (!start(team.least(read()))) return;
      rejected = draw_atom();
      if (rejected == 0) return;
    } else if constexpr (kDraws == Draws::Any) {
      const cukit::List list(static_cast<uint64*>(values), &space.cursor, p.capacity);
      Candidates candidates(team, row, space, atoms, list);
      const Streamed pass =
          candidates.collect({max(row_top_k, want), row_top_p, row_min_p}, p.capacity, weighs,
                             slope);
      own = pass.own;
      if (!start(pass.least)) return;
      if (weighs) all = atoms.total(largest, slope).total;
      const int needed = candidates.covers(1, largest, slope) ? want : max(row_top_k, want);
      if (pass.failed ? row_top_k == 0 && want == 0 : pass.count >= static_cast<unsigned>(needed)) {
        __syncthreads();
        if (threadIdx.x == 0) space.cursor = 0;  // from here on the cursor of the workspace's list
        candidates.close(pass);
        Selection<Candidates> selection(team, candidates, space, largest, slope);
        const int count = want > 0 ? selection.collect_best(want, own) : 0;
        bool suffices = count <= cukit::kMaxSorted;
        if (suffices && want > 0) {
          use_list(count);
          if (short_list) return;
        }
        if (suffices && !truncates) {
          draw_atom();
          return;
        }
        uint64 target = cukit::part_of(all, row_top_p);
        const uint64 min_weight = draw_of_row().min_weight;
        bool exceeded = true;
#pragma unroll 1
        for (bool narrowed = false; suffices || narrowed; narrowed = true) {
          if (narrowed || candidates.lists()) cut = cut_of(selection, target, exceeded);
          suffices = narrowed ? !exceeded && candidates.exceeds(min_weight, largest, slope)
                              : row_top_k > 0 || (row_top_p < 1.0f && !exceeded) ||
                                    candidates.covers(min_weight, largest, slope);
          if (suffices || narrowed || !exceeded || row_top_p >= 1.0f ||
              !candidates.narrow(target, all, largest, slope, p.capacity)) {
            break;
          }
        }
        if (suffices) {
          rejected = draw_kept(candidates, cut, 0);
          if (rejected == 0) return;
        }
      }
    }
    if (rejected == 0) {
      __syncthreads();
      for (int b = threadIdx.x; b < cukit::kBins; b += THREADS) space.bins[0][b] = space.bins[1][b] = 0;
      if (threadIdx.x == 0) space.cursor = 0;
      __syncthreads();
    }
  } else {
    own = read();
    team.wait_for_start();
    if (!start(team.least(own))) return;
    if (weighs) all = atoms.total(largest, slope).total;
  }

  if (kDraws != Draws::All && rejected == 0) {
    Selection<Row> selection(team, row, space, largest, slope);
    if (want > 0) {
      int count = selection.collect_best(want, own);
      if (count > cukit::kMaxSorted) {
        bool exceeded;
        count = selection.collect(selection.template cut<By::Count>(want, -1.0f, Cut(), exceeded));
      }
      use_list(count);
      if (short_list) return;
    }
    if (truncates) {
      bool exceeded;
      cut = cut_of(selection, cukit::part_of(all, row_top_p), exceeded);
    } else {
      rejected = draw_atom();
      if (rejected == 0) return;
    }
  }
  draw_kept(atoms, cut, rejected);
}
