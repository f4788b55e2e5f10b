// Lists the candidates of a truncated draw, usually in a single pass over a row: all tokens above a
// threshold, thousands if necessary. select.cuh then selects from the list in shared memory.
//
// The first round samples logits from the whole row. A histogram of the sample yields the
// threshold: as high as the options permit, minus a margin, but not so low that the list is
// expected to overflow. Whether the listed tokens suffice is decided exactly afterwards. If they
// weigh less than top_p requires, a second pass sums the weights of the tokens above an interval of
// logits that should contain the last kept token, and lists the tokens within the interval. If the
// sample shows that one pass will not suffice, the first pass lists nothing.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/max_nan.cuh"
#include "sampling/atoms.cuh"
#include "sampling/list.cuh"
#include "sampling/select.cuh"

namespace cukit {

// What the list must contain.
struct Demand {
  int count;       // at least this many of the most likely tokens
  float top_p;     // below 1: the most likely tokens with this fraction of the total weight
  float min_p;     // above 0: the tokens with at least this fraction of the largest weight
};

class Candidates {
 public:
  // list: must be empty.
  CUKIT_DEVICE Candidates(Team& team, const Row& row, Workspace& space, Atoms& atoms, const List& list)
      : team_(team), row_(row), space_(space), atoms_(atoms), list_(list) {}

  // weigh: also store the atoms' sums.
  CUKIT_DEVICE Streamed collect(const Demand& demand, int capacity, bool weigh, float slope) {
    float largest = -infinity();
    atoms_.each<true>([&](int i, int atom, const Row::Atom& vectors, int first, float lane_max) {
      largest = max_nan(largest, lane_max);
      if (weigh && atom >= 0) atoms_.weigh(atom, vectors, first, lane_max, slope);
      if (i == 0) limit_ = bound(vectors, first, lane_max, demand, capacity, slope);
      if (__any_sync(kFullMask, lane_max >= limit_)) {
        list_.append_many(row_, vectors, first, limit_, infinity());
      }
    });
    const unsigned own = descending_key(largest + 0.0f);
    const unsigned least = team_.least(own);
    const unsigned count = list_.size();
    return {own, least, count, count > static_cast<unsigned>(capacity)};
  }

  // After this, the list's cursor may be used for another list. Drops a list that overflowed.
  CUKIT_DEVICE void close(const Streamed& pass) {
    count_ = pass.failed ? 0 : pass.count;
    if (pass.failed) limit_ = infinity();
  }

  // False if the first pass lists nothing.
  CUKIT_DEVICE bool lists() const { return limit_ < infinity(); }

  // Whether the list has all tokens with a weight of at least `min_weight`, or all above -infinity.
  CUKIT_DEVICE bool covers(uint64 min_weight, float largest, float slope) const {
    if (limit_ == kLowest) return true;
    const float weight = exp2f((limit_ - largest) * slope) * 1.001f;
    return weight * static_cast<float>(1ull << kScale) < static_cast<float>(min_weight);
  }

  // Calls body(logit, token) for this thread's share of the list: Source of select.cuh.
  template <typename Body>
  CUKIT_DEVICE void each(const Body& body) const {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count_; i += THREADS) {
      const uint64 entry = list_[i];
      body(logit_of(static_cast<unsigned>(entry >> 32)), static_cast<int>(static_cast<unsigned>(entry)));
    }
  }
  CUKIT_DEVICE int columns() const { return row_.columns(); }

  // The second pass. Returns false if the list overflows, or if the tokens above the interval weigh
  // at least `target`; otherwise subtracts their weight from `target`. total: the weight of all
  // tokens.
  CUKIT_DEVICE bool narrow(uint64& target, uint64 total, float largest, float slope, int capacity) {
    list_.clear();
    float lower = 0.0f;
    uint64 own = 0;
    atoms_.each<true>([&](int i, int atom, const Row::Atom& vectors, int first, float lane_max) {
      if (i == 0) {
        interval(vectors, first, lane_max, largest, slope, total - target, capacity, lower);
      }
      WeightSum sum;
#pragma unroll
      for (int u = 0; u < ATOM; ++u) {
        float x[VEC];
        row_.values_of(x, vectors, u, first);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float share = exp2f(-(largest - x[j]) * slope);
          sum.add(x[j] >= upper_ ? share : 0.0f);
        }
      }
      const uint64 above = atom >= 0 ? sum.value() : 0;
      own += above;
      if (atom >= 0) atoms_.replace(atom, warp_sum(above));
      if (__any_sync(kFullMask, lane_max >= lower)) {
        list_.append_many(row_, vectors, first, lower, upper_);
      }
    });
    const Team::Sum above = team_.sum(own);
    count_ = list_.size();
    __syncthreads();
    list_.clear();
    if (count_ > static_cast<unsigned>(capacity) || above.total >= target) return false;
    target -= above.total;
    return true;
  }

  // Whether all tokens above the list of the second pass have a weight of at least `min_weight`.
  CUKIT_DEVICE bool exceeds(uint64 min_weight, float largest, float slope) const {
    const float weight = exp2f((upper_ - largest) * slope) * 0.999f;
    return weight * static_cast<float>(1ull << kScale) > static_cast<float>(min_weight);
  }

  // Weights of the atoms.
  struct Sum {
    uint64 own[kBins / THREADS];  // of consecutive atoms
    uint64 before;                // of the atoms of the threads before this one
    uint64 total;
  };

  // Whether the list has all kept tokens: false after narrow(), which does not list the tokens
  // above its interval.
  CUKIT_DEVICE bool complete() const { return upper_ == infinity(); }

  // Sums the weights weight_of(logit, token) by atom: those of the list and, unless it is complete, the sums of
  // narrow(). Weights of tokens below the list must be 0.
  template <typename WeightOf>
  CUKIT_DEVICE Sum sum(const WeightOf& weight_of) {
    // Adjacent entries of the list mostly belong to one atom: a thread sums consecutive entries, and adds to the bins
    // only when the atom changes.
    const auto add = [&](int atom, uint64 sum) {
      if (sum == 0) return;
      atomicAdd(&space_.bins[0][atom], static_cast<unsigned>(sum) & kLowMask);
      atomicAdd(&space_.bins[1][atom], static_cast<unsigned>(sum >> kHalf));
    };
    const unsigned per = (count_ + THREADS - 1) / THREADS | 1;  // odd: no bank conflicts
    const unsigned begin = min(threadIdx.x * per, count_), end = min(begin + per, count_);
    int current = 0;
    uint64 sum = 0;
#pragma unroll 1
    for (unsigned i = begin; i < end; ++i) {
      const uint64 entry = list_[i];
      const auto token = static_cast<int>(static_cast<unsigned>(entry));
      if (token / kAtomTokens != current) {
        add(current, sum);
        current = token / kAtomTokens;
        sum = 0;
      }
      sum += weight_of(logit_of(static_cast<unsigned>(entry >> 32)), token);
    }
    add(current, sum);
    __syncthreads();
    Sum sums;
#pragma unroll
    for (int j = 0; j < kBins / THREADS; ++j) {
      const int atom = threadIdx.x * (kBins / THREADS) + j;
      sums.own[j] = (static_cast<uint64>(space_.bins[1][atom]) << kHalf) + space_.bins[0][atom];
      space_.bins[0][atom] = space_.bins[1][atom] = 0;
      if (!complete() && atom < row_.atoms()) sums.own[j] += atoms_.replaced(atom);
    }
    sums.before = prefix(sums.own, sums.total);
    return sums;
  }

  // Calls winner(logit, token) for the token whose range of prefix sums contains `place`, in order
  // of token id. `sum`: the result of sum(weight_of). The sums of the atoms select an atom, which
  // is read again.
  template <typename WeightOf, typename Winner>
  CUKIT_DEVICE void find(const Sum& sum, uint64 place, const WeightOf& weight_of, const Winner& winner) {
    unsigned message[kMessage] = {};
    const bool sends = locate(sum.own, sum.before, place, [&](int j, uint64 left) {
      message[0] = threadIdx.x * (kBins / THREADS) + j;
      message[1] = static_cast<unsigned>(left);
      message[2] = static_cast<unsigned>(left >> 32);
    });
    team_.broadcast(message, sends);
    constexpr int kPer = (kAtomTokens + THREADS - 1) / THREADS;
    const int offset = static_cast<int>(threadIdx.x) * kPer;
    const int first = static_cast<int>(message[0]) * kAtomTokens + offset;
    uint64 weights[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const bool exists = offset + j < kAtomTokens && first + j < columns();
      weights[j] = exists ? weight_of(row_.at(first + j), first + j) : 0;
    }
    uint64 total;
    const uint64 before = prefix(weights, total);
    locate(weights, before, static_cast<uint64>(message[2]) << 32 | message[1],
           [&](int j, uint64) { winner(row_.at(first + j), first + j); });
  }

 private:
  static constexpr float kLowest = -3.402823466e38f;
  static constexpr int kHalf = 21;
  static constexpr unsigned kLowMask = (1u << kHalf) - 1;
  static_assert(kScale <= 2 * kHalf && kHalf + 10 <= 31, "sums of 1024 halves fit in 32 bits");
  // Vectors of a lane's first atom in the sample: a block of 512 threads samples 4096 logits.
  static constexpr int kSampled = kAccessesOf8;
  static constexpr float kPerOctave = 32.0f;  // bins of the histogram per factor of two in weight
  static constexpr int kBinScale = 30;
  // Margin for the error of a number of tokens that is predicted from the sample, in standard deviations.
  static constexpr float kDeviations = 3.5f;

  // The number of tokens that one sampled token represents.
  CUKIT_DEVICE float tokens_per_sample() const {
    const int sampled = min(kWarps, (row_.atoms() + row_.rounds() - 1) / row_.rounds());
    return static_cast<float>(columns()) / static_cast<float>(sampled * (kSampled * kWarpSize * VEC));
  }

  // The largest number of sampled tokens for which the tokens that they represent are expected to
  // fit in the list; infinity if the list can hold the whole vocabulary.
  CUKIT_DEVICE float room_for(int capacity) const {
    const float full = static_cast<float>(capacity) / tokens_per_sample();
    return capacity < columns() ? full - kDeviations * sqrtf(full) : infinity();
  }

  template <int N>
  CUKIT_DEVICE uint64 prefix(const uint64 (&own)[N], uint64& total) {
    uint64 sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += own[j];
    return block_scan(sum, total, space_.scans);
  }

  // Calls found(j, left) in the thread whose value j contains `place`, which is true for one thread.
  template <int N, typename Found>
  CUKIT_DEVICE bool locate(const uint64 (&own)[N], uint64 before, uint64 place, const Found& found) const {
    bool here = false;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (before <= place && place < before + own[j]) {
        found(j, place - before);
        here = true;
      }
      before += own[j];
    }
    return here;
  }

  // Counts the sampled tokens (this lane's first vectors of an atom) in bins by distance from
  // `largest`. Sets `counts` to the counts of this thread's bins, and clears the bins.
  template <int N>
  CUKIT_DEVICE void sample(uint64 (&counts)[N], const Row::Atom& vectors, int first, float lane_max,
                           float largest, float slope) {
#pragma unroll
    for (int u = 0; u < kSampled; ++u) {
      float x[VEC];
      row_.values_of(x, vectors, u, first);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float at = fminf((largest - x[j]) * slope * kPerOctave, kBins - 1);
        if (row_.column_of(first, u) + j < columns() && lane_max > -infinity()) {
          atomicAdd(&space_.bins[0][static_cast<unsigned>(at)], 1u);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) {
      counts[j] = space_.bins[0][threadIdx.x * N + j];
      space_.bins[0][threadIdx.x * N + j] = 0;
    }
  }

  // The weight of the tokens of a bin, in units of 2^-kBinScale.
  CUKIT_DEVICE static uint64 weight_of_bin(uint64 count, int bin) {
    const float octave = (static_cast<float>(bin) + 0.5f) / kPerOctave;
    return static_cast<uint64>(static_cast<float>(count) * exp2f(kBinScale - octave));
  }

  // The threshold, from a sample. If only top_p truncates, and the tokens that fit in the list fall
  // short of top_p by more than half of 1 - top_p, infinity. Contains barriers.
  CUKIT_DEVICE float bound(const Row::Atom& vectors, int first, float lane_max,
                           const Demand& demand, int capacity, float slope) {
    const float largest = logit_of(team_.least(descending_key(lane_max + 0.0f)));
    if (!(largest > -infinity() && largest < infinity())) return kLowest;
    unsigned& reachable = space_.groups[0];
    if (threadIdx.x == 0) space_.limit = reachable = 0;
    constexpr int kPer = kBins / THREADS;
    uint64 counts[kPer], weights[kPer], sampled, weight;
    sample(counts, vectors, first, lane_max, largest, slope);
#pragma unroll
    for (int j = 0; j < kPer; ++j) weights[j] = weight_of_bin(counts[j], threadIdx.x * kPer + j);
    uint64 upto = prefix(counts, sampled);
    uint64 above = prefix(weights, weight);
    // Each sampled token represents `ratio` tokens. A bin is listed if the bins above it do not suffice and the tokens
    // down to it fit in the list.
    const float ratio = tokens_per_sample();
    const float expected = static_cast<float>(demand.count) / ratio;
    const float enough = demand.count > 0 ? expected + 5.0f * sqrtf(expected) + 8.0f : 0.0f;
    const float room = room_for(capacity);
    const float short_of = 1.5f * (1.0f - demand.top_p) * static_cast<float>(weight);
    unsigned listed = 0;
    bool reaches = false;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const unsigned b = threadIdx.x * kPer + j;
      const float below = static_cast<float>(weight - above) * ratio;
      const bool by_weight = below * 2.0f <= (1.0f - demand.top_p) * (static_cast<float>(above) + below);
      const bool by_distance = exp2f(-static_cast<float>(b) / kPerOctave) * 1.01f < demand.min_p;
      const bool truncates = demand.top_p < 1.0f || demand.min_p > 0.0f;
      const bool suffices = static_cast<float>(upto) >= enough && (!truncates || by_weight || by_distance);
      upto += counts[j];
      above += weights[j];
      if (b > 0 && (suffices || static_cast<float>(upto) > room)) continue;
      listed = b;
      reaches = demand.count > 0 || demand.min_p > 0.0f || static_cast<float>(weight - above) <= short_of;
    }
    atomicMax(&space_.limit, listed);
    if (reaches) atomicMax(&reachable, 1u);
    __syncthreads();
    if (reachable == 0) return infinity();
    if (space_.limit == kBins - 1) return kLowest;
    return largest - static_cast<float>(space_.limit + 1) / kPerOctave / slope;
  }

  // Sets `lower` and `upper_` to an interval [lower, upper_) of logits that should contain the last
  // kept token. From a sample: around the bin below which the tokens have the total weight `below`.
  // Contains barriers.
  CUKIT_DEVICE void interval(const Row::Atom& vectors, int first, float lane_max, float largest,
                             float slope, uint64 below, int capacity, float& lower) {
    constexpr int kPer = kBins / THREADS;
    unsigned& centre = space_.limit;
    unsigned& nearest = space_.groups[0];
    unsigned& farthest = space_.groups[1];
    if (threadIdx.x == 0) centre = farthest = 0, nearest = kBins;
    uint64 counts[kPer], weights[kPer], sampled, weight;
    sample(counts, vectors, first, lane_max, largest, slope);
#pragma unroll
    for (int j = 0; j < kPer; ++j) weights[j] = weight_of_bin(counts[j], threadIdx.x * kPer + j);
    const uint64 before = prefix(counts, sampled);
    const uint64 above = prefix(weights, weight);
    const float ratio = tokens_per_sample();
    constexpr float kUnits = 1.0f / (1ull << (kScale - kBinScale));
    const auto lighter = static_cast<uint64>(static_cast<float>(below) * kUnits / ratio);
    const uint64 place = weight - min(lighter, weight);
    uint64 upto = before;
    uint64 heavier = above;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      upto += counts[j];
      heavier += weights[j];
      if (heavier <= place) atomicMax(&centre, static_cast<unsigned>(upto));
    }
    __syncthreads();
    const float half = fminf(2.5f * sqrtf(static_cast<float>(sampled)), 0.5f * room_for(capacity));
    upto = before;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const float from = static_cast<float>(upto) - static_cast<float>(centre);
      upto += counts[j];
      const float to = static_cast<float>(upto) - static_cast<float>(centre);
      if (to >= -half && from <= half) {
        atomicMin(&nearest, threadIdx.x * kPer + j);
        atomicMax(&farthest, threadIdx.x * kPer + j);
      }
    }
    __syncthreads();
    const auto edge = [&](unsigned bin) { return largest - static_cast<float>(bin) / kPerOctave / slope; };
    upper_ = edge(nearest);
    lower = farthest == kBins - 1 ? kLowest : edge(farthest + 1);
  }

  Team& team_;
  const Row& row_;
  Workspace& space_;
  Atoms& atoms_;
  List list_;
  unsigned count_ = 0;
  float limit_ = 0.0f;         // listed: logits of at least limit_
  float upper_ = infinity();   // after narrow(): listed logits are below upper_
};

}  // namespace cukit
