// Finds the last kept token for a rank limit (top-k) or a weight limit (top-p), without sorting the
// row. The tokens are those of a row (row.cuh) or of a list that contains the most likely tokens of
// the row (candidates.cuh).
//
// Radix select: tokens are counted, or their weights summed, in bins, first by their distance from
// the largest logit, then by the digits of their sort key (bits of the logit, then of the token
// id), beginning with the first bit in which the keys of a bin can differ. Every round continues
// with the tokens of the bin that contains the limit. Once that bin holds at most kFew tokens,
// block 0 collects and sorts them.
#pragma once

#include "common/platform.cuh"
#include "sampling/row.cuh"
#include "sampling/team.cuh"
#include "sampling/weight.cuh"

namespace cukit {

constexpr int kBins = 2048;
constexpr int kMaxSorted = 1024;    // tokens that block 0 can sort
constexpr int kBinsPerOctaveLog2 = 5;
constexpr float kBinsPerNat = 46.166241308446828f;  // By::Count: 2^5 per octave at temperature 1
constexpr int kLowBits = 12;
static_assert(2 * kLowBits == kMantissaBits && kLowBits + kVocabularyBits == 32, "sums of both parts fit in 32 bits");
static_assert(((kScale + 1) << kBinsPerOctaveLog2) < kBins, "every weight has a bin");
static_assert(kMaxSorted % THREADS == 0, "equally many entries per thread");

// Shared memory of a block. Between rounds `bins` and `cursor` are zero.
struct Workspace {
  Team::Shared team;
  unsigned bins[2][kBins];  // counts, or low and high parts of sums of significands
  uint64 list[kMaxSorted];  // ranks, in block 0
  uint64 scans[kWarps];
  unsigned groups[128];     // best.cuh, candidates.cuh
  unsigned cursor;          // entries appended to a list
  unsigned limit;           // best.cuh, candidates.cuh
};
constexpr int kWorkspaceBytes = 26 * 1024;
static_assert(sizeof(Workspace) <= kWorkspaceBytes, "_WORKSPACE_BYTES in cukit/sampling/_plan.py");

// The last token that is kept.
struct Cut {
  float logit = -infinity();
  int token = 0x7fffffff;

  CUKIT_DEVICE bool keeps(float x, int column) const {
    return x > logit || (x == logit && column <= token);
  }
};

enum class By { Count, Weight };

// Exclusive prefix sum over the threads of a block; `total` is the sum of all. Contains barriers.
CUKIT_DEVICE uint64 block_scan(uint64 value, uint64& total, uint64* scratch) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint64 upto = warp_scan(value);
  __syncthreads();
  if (lane == kWarpSize - 1) scratch[warp] = upto;
  __syncthreads();
  const uint64 other = lane < kWarps ? scratch[lane] : 0;
  total = warp_sum(other);
  return warp_sum(lane < warp ? other : 0) + upto - value;
}

// Bitonic sort of the first `count` entries, ascending. All threads must call it; contains barriers.
CUKIT_DEVICE void sort_list(uint64* list, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += THREADS) list[i] = kNoRank;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
        const int low = pair / stride * stride * 2 + pair % stride;
        const uint64 a = list[low], b = list[low + stride];
        if ((a > b) == ((low & run) == 0)) {
          list[low] = b;
          list[low + stride] = a;
        }
      }
      // With strides of up to 32, a warp's pairs are always the same 64 entries.
      const int next = stride > 1 ? stride / 2 : run;
      if (max(stride, next) > kWarpSize) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// Source: a type with each(body), which calls body(logit, token) for each of this thread's tokens, and columns(), the
// size of the vocabulary.
template <typename Source>
class Selection {
 public:
  CUKIT_DEVICE Selection(Team& team, const Source& source, Workspace& space, float largest, float slope)
      : team_(team), source_(source), space_(space), largest_(largest), slope_(slope) {}

  CUKIT_DEVICE Scaled scaled(float x) const { return Scaled(largest_ - x, slope_); }

  // Collects at least the `want` most likely tokens in block 0's list, unsorted; returns their
  // number, which may exceed the list's capacity. `own` is the key of this thread's largest logit.
  CUKIT_DEVICE int collect_best(int want, unsigned own) {
    // If the largest logits of `want` threads are in bins 0 .. b, these bins have at least `want`
    // tokens.
    atomicAdd(&space_.bins[0][count_bin(largest_ - logit_of(own))], 1u);
    const Found found = find<By::Count>(static_cast<uint64>(want), 0.0f, -1);
    const bool all = found.bin == kBins - 1;
    const float limit = static_cast<float>(found.bin + 1);
    const unsigned mine =
        append([&](float x, int) { return all || (largest_ - x) * kBinsPerNat < limit; });
    const Team::Sum sum = team_.sum(0, mine);
    if (team_.is_leader() && threadIdx.x == 0) space_.cursor = 0;
    return static_cast<int>(sum.count);
  }

  // Collects the tokens that `cut` keeps, at most kMaxSorted of them; returns their number.
  CUKIT_DEVICE int collect(const Cut& cut) {
    const unsigned mine = append([&](float x, int column) { return cut.keeps(x, column); });
    const Team::Sum sum = team_.sum(0, mine);
    if (team_.is_leader() && threadIdx.x == 0) space_.cursor = 0;
    return static_cast<int>(sum.count);
  }

  // By::Count: the cut after `target` tokens. By::Weight: the cut after the fewest tokens whose weight is at
  // least `target` or, if `part` is not negative, `part` of the weight of all tokens that `within` keeps.
  // If the tokens that `within` keeps do not reach the target, returns `within` and sets `exceeded`.
  template <By by>
  CUKIT_DEVICE Cut cut(uint64 target, float part, const Cut& within, bool& exceeded) {
    const bool whole = within.token == Cut().token && within.logit == Cut().logit;
    const auto count = [&](unsigned at, const Scaled& weight) {
      if constexpr (by == By::Count) {
        atomicAdd(&space_.bins[0][at], 1u);
      } else {
        // The largest logit has 2^24 units, and the high parts of 2^20 such tokens would overflow: odd threads move
        // one unit of the high part, 2^12, to the low part.
        const unsigned units = weight.units();
        const unsigned moved = units >> kMantissaBits & threadIdx.x % 2;
        atomicAdd(&space_.bins[0][at], (units & ((1u << kLowBits) - 1)) + (moved << kLowBits));
        atomicAdd(&space_.bins[1][at], (units >> kLowBits) - moved);
      }
    };
    source_.each([&](float x, int column) {
      // Weights of octaves above kScale are 0; these include the logits past the end of the
      // vocabulary, which are -infinity.
      const Scaled weight = scaled(x);
      const bool counts = by == By::Weight ? weight.octave() <= kScale : column < source_.columns();
      if (counts && (whole || within.keeps(x, column))) count(bin_of<by>(x, weight), weight);
    });
    Found found = find<by>(target, part, -1);
    exceeded = !found.reached;
    if (exceeded) return within;
    const unsigned bin = found.bin;
    const Span span = span_of<by>(bin);
    const Keys keys(span, largest_);
    uint64 prefix = 0;  // of the sort keys of the remaining tokens
    int prefix_shift = keys.bits;
    const auto remains = [&](float x, int column) {
      if (!span.near(largest_ - x) || column >= source_.columns()) return false;
      const Scaled weight = scaled(x);
      if (!(whole || within.keeps(x, column)) || bin_of<by>(x, weight) != bin) return false;
      return (by == By::Count || weight.weight() > 0) && keys.of(x, column) >> prefix_shift == prefix;
    };
#pragma unroll 1
    for (;;) {
      target = found.target;
      if (found.tokens <= kFew) {
        append(remains);
        Cut last;
        if (last_of<by>(target, last)) return last;
      }
      const int shift = max(prefix_shift - kDigitBits, 0), width = prefix_shift - shift;
      source_.each([&](float x, int column) {
        if (!remains(x, column)) return;
        count(static_cast<unsigned>(keys.of(x, column) >> shift) & ((1u << width) - 1), scaled(x));
      });
      found = find<by>(target, -1.0f, static_cast<int>(bin));
      prefix = prefix << width | found.bin;
      prefix_shift = shift;
    }
  }

 private:
  static constexpr int kDigitBits = 11;
  static constexpr unsigned kFew = kMaxSorted / 2;  // a bin of at most kFew tokens is sorted
  static_assert(1 << kDigitBits == kBins);

  struct Found {
    unsigned bin;
    uint64 target;    // remainder of the target within the bin
    unsigned tokens;  // of the bin; by weight, estimated
    bool reached;     // false: the sum of all bins is less than the target
  };

  CUKIT_DEVICE static unsigned count_bin(float d) {
    return static_cast<unsigned>(fminf(d * kBinsPerNat, kBins - 1));
  }

  template <By by>
  CUKIT_DEVICE unsigned bin_of(float x, const Scaled& weight) const {
    if constexpr (by == By::Count) return count_bin(largest_ - x);
    return weight.below_one >> (kOctaveShift - kBinsPerOctaveLog2);
  }

  // The range of the distances of a bin's tokens from the row's largest logit, slightly widened:
  // rejects most tokens of other bins without computing their weights.
  struct Span {
    float nearest = 0.0f, farthest = infinity();

    CUKIT_DEVICE bool near(float d) const { return d >= nearest && d <= farthest; }
  };

  template <By by>
  CUKIT_DEVICE Span span_of(unsigned bin) const {
    float nearest, farthest, margin = 0.0f;
    if constexpr (by == By::Count) {
      nearest = static_cast<float>(bin) / kBinsPerNat;
      farthest = bin == kBins - 1 ? infinity() : static_cast<float>(bin + 1) / kBinsPerNat;
    } else {
      constexpr int kShift = kOctaveShift - kBinsPerOctaveLog2;
      nearest = -log2f(__uint_as_float(kOne - (bin << kShift))) / slope_;
      farthest = -log2f(__uint_as_float(kOne - ((bin + 1) << kShift))) / slope_;
      margin = 4e-6f / slope_;
    }
    margin += 1e-5f * farthest;
    Span span;
    span.nearest = fmaxf(nearest - margin, 0.0f);
    span.farthest = farthest + margin;
    return span;
  }

  // Sort keys of the tokens of a span, relative to the key of a logit slightly above the span.
  struct Keys {
    unsigned base;  // key of a logit above those of the span
    int bits;

    CUKIT_DEVICE Keys(const Span& span, float largest) {
      // Differences from `largest` are rounded.
      constexpr float kRounding = 2.4e-7f;
      constexpr unsigned kMargin = 4;
      base = descending_key(largest - span.nearest * (1.0f - kRounding));
      base -= min(base, kMargin);
      const unsigned end = descending_key(largest - span.farthest * (1.0f + kRounding)) + kMargin;
      bits = 32 - __clz(static_cast<int>(end - base)) + kVocabularyBits;
    }
    CUKIT_DEVICE uint64 of(float x, int column) const {
      return static_cast<uint64>(descending_key(x) - base) << kVocabularyBits |
             static_cast<unsigned>(column);
    }
  };

  // Appends this thread's tokens that satisfy `inside` to block 0's list; returns their number.
  template <typename Inside>
  CUKIT_DEVICE unsigned append(const Inside& inside) {
    unsigned mine = 0;
    source_.each([&](float x, int column) {
      if (!inside(x, column) || column >= source_.columns()) return;
      ++mine;
      const unsigned at = team_.add_to(0, &space_.cursor, 1);
      if (at < kMaxSorted) team_.store_to_leader(&space_.list[at], rank_of(x, column));
    });
    return mine;
  }

  // Adds up the bins of all blocks and finds the bin in which the prefix sum reaches `target`, or,
  // by weight and if `part` is not negative, `part` of the total; the last bin if no bin does.
  // Clears the bins. chosen: -1 in the first round; later the bin that the first round returned,
  // to which all counted tokens belong.
  template <By by>
  CUKIT_DEVICE Found find(uint64 target, float part, int chosen) {
    constexpr int kKinds = by == By::Count ? 1 : 2;
    constexpr int kShare = kBins / CLUSTER;  // bins of all blocks that a block adds up
    constexpr int kPer = kShare > THREADS ? kShare / THREADS : 1;
    const int first = team_.rank() * kShare;
    __syncthreads();
    if constexpr (CLUSTER > 1) {
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        for (int b = threadIdx.x; b < kBins; b += THREADS) {
          if (b / kShare == team_.rank()) continue;
          const unsigned value = space_.bins[kind][b];
          if (value == 0) continue;
          team_.add_to(b / kShare, &space_.bins[kind][b], value);
          space_.bins[kind][b] = 0;
        }
      }
      team_.sync();
    }
    uint64 own[kPer], sum = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int at = threadIdx.x * kPer + j, b = first + at;
      own[j] = 0;
      if (kShare % THREADS != 0 && at >= kShare) continue;
      own[j] = space_.bins[0][b];
      space_.bins[0][b] = 0;
      if constexpr (by == By::Weight) {
        own[j] += static_cast<uint64>(space_.bins[1][b]) << kLowBits;
        space_.bins[1][b] = 0;
        own[j] <<= Scaled::shift((chosen < 0 ? b : chosen) >> kBinsPerOctaveLog2);
      }
      sum += own[j];
    }
    const Team::Sum all = team_.sum(sum);
    uint64 before = all.before + warp_scan(sum) - sum;
    if (by == By::Weight && part >= 0.0f) target = part_of(all.total, part);
    unsigned message[kMessage] = {kBins - 1, 0, 0, 0};
    bool sends = all.total < target && team_.is_leader() && threadIdx.x == 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      if (before < target && target <= before + own[j]) {
        sends = true;
        message[0] = first + threadIdx.x * kPer + j;
        message[1] = static_cast<unsigned>(target - before);
        message[2] = static_cast<unsigned>((target - before) >> 32);
        const auto sum_of_bin = static_cast<float>(own[j]);
        float each = 1.0f;
        if constexpr (by == By::Weight) {
          const int b = chosen < 0 ? static_cast<int>(message[0]) : chosen;
          each = exp2f(kScale - static_cast<float>(b) / (1 << kBinsPerOctaveLog2));
        }
        message[3] = 1 + static_cast<unsigned>(fminf(sum_of_bin / each, 1 << kVocabularyBits));
      }
      before += own[j];
    }
    team_.broadcast(message, sends);
    return {message[0], static_cast<uint64>(message[2]) << 32 | message[1], message[3] - 1, message[3] != 0};
  }

  // Sets `cut` to the token of the list at which the prefix sum reaches `target`, and empties the list; false if it
  // overflowed.
  template <By by>
  CUKIT_DEVICE bool last_of(uint64 target, Cut& cut) {
    team_.sync();
    bool sends = false;
    unsigned message[kMessage] = {};
    if (team_.is_leader()) {
      const unsigned count = space_.cursor;
      if (count > kMaxSorted) {
        sends = threadIdx.x == 0;
        __syncthreads();
      } else {
        sort_list(space_.list, static_cast<int>(count));
        constexpr int kPer = kMaxSorted / THREADS;
        uint64 own[kPer], sum = 0;
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          const unsigned at = threadIdx.x * kPer + j;
          own[j] = at >= count ? 0
                   : by == By::Count
                       ? 1
                       : scaled(logit_of(static_cast<unsigned>(space_.list[at] >> 32))).weight();
          sum += own[j];
        }
        uint64 total;
        uint64 before = block_scan(sum, total, space_.scans);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          if (before < target && target <= before + own[j]) {
            const uint64 rank = space_.list[threadIdx.x * kPer + j];
            sends = true;
            message[0] = static_cast<unsigned>(rank >> 32);
            message[1] = static_cast<unsigned>(rank);
            message[2] = 1;
          }
          before += own[j];
        }
      }
      if (threadIdx.x == 0) space_.cursor = 0;
    }
    team_.broadcast(message, sends);
    cut = {logit_of(message[0]), static_cast<int>(message[1])};
    return message[2] != 0;
  }

  Team& team_;
  const Source& source_;
  Workspace& space_;
  float largest_, slope_;
};

}  // namespace cukit
