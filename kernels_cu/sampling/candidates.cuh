// Lists the candidates of a truncated draw in a single pass over a row: all tokens above a threshold, thousands if
// necessary, to which select.cuh is then applied in shared memory.
//
// The first round samples logits all over the row. A histogram of the sample yields the threshold: as high as the
// options permit with a margin, but so low at most that the list is expected to hold its tokens. Whether the
// listed tokens suffice is decided exactly afterwards; if they do not, the row is read again.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/max_nan.cuh"
#include "sampling/atoms.cuh"
#include "sampling/list.cuh"
#include "sampling/select.cuh"

namespace cukit {

// What the list must contain.
struct Demand {
  int count;       // at least so many of the most likely tokens
  float top_p;     // below 1: the most likely tokens with this part of the weight
  float min_p;     // above 0: the tokens with this part of the largest weight
};

class Candidates {
 public:
  // list: empty.
  CUKIT_DEVICE Candidates(Team& team, const Row& row, Workspace& space, Atoms& atoms, const List& list)
      : team_(team), row_(row), space_(space), atoms_(atoms), list_(list) {}

  // weigh: also store the atoms' sums.
  CUKIT_DEVICE Streamed collect(const Demand& demand, int capacity, bool weigh, float slope) {
    float largest = -infinity();
    atoms_.each<true>([&](int i, int atom, const Row::Atom& vectors, int first, float most) {
      largest = max_nan(largest, most);
      if (weigh && atom >= 0) atoms_.weigh(atom, vectors, first, most, slope);
      if (i == 0) limit_ = bound(vectors, first, most, demand, capacity, slope);
      if (most >= limit_) list_.append(row_, vectors, first, limit_);
    });
    const unsigned own = descending_key(largest + 0.0f);
    const unsigned least = team_.least(own);
    const unsigned count = list_.size();
    return {own, least, count, count > static_cast<unsigned>(capacity)};
  }

  // Sets the number of listed tokens; the list's cursor may be used for another list afterwards.
  CUKIT_DEVICE void close(unsigned count) { count_ = count; }

  // Whether all tokens of a weight of at least `least_weight`, or all above -infinity, are listed.
  CUKIT_DEVICE bool covers(uint64 least_weight, float largest, float slope) const {
    if (limit_ == kLowest) return true;
    const float weight = exp2f((limit_ - largest) * slope) * 1.001f;
    return weight * static_cast<float>(1ull << kScale) < static_cast<float>(least_weight);
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

  // Draws from the listed tokens in order of token id, with weights weight_of(logit, token): the sums of each atom's
  // tokens select an atom, whose tokens are then sorted by id.
  template <typename WeightOf, typename Winner>
  CUKIT_DEVICE void draw(uint64 uniform, const WeightOf& weight_of, const Winner& winner) {
    static_assert(kAtomTokens <= kMost, "the tokens of an atom fit in the workspace's list");
    each([&](float x, int token) {
      const uint64 weight = weight_of(x, token);
      if (weight == 0) return;
      atomicAdd(&space_.bins[0][token / kAtomTokens], static_cast<unsigned>(weight) & kLowMask);
      atomicAdd(&space_.bins[1][token / kAtomTokens], static_cast<unsigned>(weight >> kHalf));
    });
    for (int i = threadIdx.x; i < kMost; i += THREADS) space_.list[i] = 0;
    __syncthreads();
    unsigned message[kMessage] = {};
    uint64 own[kBins / THREADS], total;
#pragma unroll
    for (int j = 0; j < kBins / THREADS; ++j) {
      const int atom = threadIdx.x * (kBins / THREADS) + j;
      own[j] = (static_cast<uint64>(space_.bins[1][atom]) << kHalf) + space_.bins[0][atom];
    }
    uint64 before = prefix(own, total);
    const uint64 place = __umul64hi(uniform, total);
    const bool sends = find(own, before, place, [&](int j, uint64 left) {
      message[0] = threadIdx.x * (kBins / THREADS) + j;
      message[1] = static_cast<unsigned>(left);
      message[2] = static_cast<unsigned>(left >> 32);
    });
    team_.broadcast(message, sends);
    const int atom = static_cast<int>(message[0]);
    each([&](float x, int token) {
      if (token / kAtomTokens == atom) space_.list[token % kAtomTokens] = weight_of(x, token);
    });
    __syncthreads();
    uint64 weights[kMost / THREADS];
#pragma unroll
    for (int j = 0; j < kMost / THREADS; ++j) {
      weights[j] = space_.list[threadIdx.x * (kMost / THREADS) + j];
    }
    before = prefix(weights, total);
    find(weights, before, static_cast<uint64>(message[2]) << 32 | message[1], [&](int j, uint64) {
      const int token = atom * kAtomTokens + threadIdx.x * (kMost / THREADS) + j;
      winner(row_.at(token), token);
    });
  }

 private:
  static constexpr float kLowest = -3.402823466e38f;
  static constexpr int kHalf = 21;
  static constexpr unsigned kLowMask = (1u << kHalf) - 1;
  static_assert(kScale <= 2 * kHalf && kHalf + 10 <= 31, "sums of 1024 halves fit in 32 bits");
  // Vectors of a lane's first atom in the sample: 8 logits, so that a block of 512 threads samples 4096.
  static constexpr int kSampled = VEC >= 8 || ATOM == 1 ? 1 : 8 / VEC < ATOM ? 8 / VEC : ATOM;
  static constexpr float kPerOctave = 32.0f;

  template <int N>
  CUKIT_DEVICE uint64 prefix(const uint64 (&own)[N], uint64& total) {
    uint64 sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += own[j];
    return block_scan(sum, total, space_.scans);
  }

  // Calls found(j, left) in the thread whose value j contains `place`, which is true for one thread.
  template <int N, typename Found>
  CUKIT_DEVICE bool find(const uint64 (&own)[N], uint64 before, uint64 place, const Found& found) const {
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

  // The threshold, from a sample: this lane's first vectors of an atom. Contains barriers.
  CUKIT_DEVICE float bound(const Row::Atom& vectors, int first, float most, const Demand& demand,
                           int capacity, float slope) {
    const float largest = logit_of(team_.least(descending_key(most + 0.0f)));
    if (!(largest > -infinity() && largest < infinity())) return kLowest;
#pragma unroll
    for (int u = 0; u < kSampled; ++u) {
      float x[VEC];
      row_.values_of(x, vectors, u, first);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float at = fminf((largest - x[j]) * slope * kPerOctave, kBins - 1);
        if (row_.column_of(first, u) + j < row_.columns() && most > -infinity()) {
          atomicAdd(&space_.bins[0][static_cast<unsigned>(at)], 1u);
        }
      }
    }
    if (threadIdx.x == 0) space_.limit = 0;
    __syncthreads();
    constexpr int kPer = kBins / THREADS;
    constexpr float kUnit = 1 << 30;
    uint64 counts[kPer], weights[kPer], sampled, weight;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int b = threadIdx.x * kPer + j;
      counts[j] = space_.bins[0][b];
      space_.bins[0][b] = 0;
      weights[j] = static_cast<uint64>(static_cast<float>(counts[j]) * exp2f(static_cast<float>(-b) / kPerOctave) * kUnit);
    }
    uint64 upto = prefix(counts, sampled);
    uint64 above = prefix(weights, weight);
    // The sample stands for `ratio` times as many tokens. A bin is listed if the bins above it do not suffice and
    // the tokens down to it fit in the list.
    const float ratio = static_cast<float>(row_.columns()) / static_cast<float>(sampled);
    const float expected = static_cast<float>(demand.count) / ratio;
    const float enough = demand.count > 0 ? expected + 5.0f * sqrtf(expected) + 8.0f : 0.0f;
    const float room = 0.7f * static_cast<float>(capacity) / ratio;
    unsigned listed = 0;
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
      if (b == 0 || (!suffices && static_cast<float>(upto) <= room)) listed = b;
    }
    atomicMax(&space_.limit, listed);
    __syncthreads();
    if (space_.limit == kBins - 1) return kLowest;
    return largest - static_cast<float>(space_.limit + 1) / kPerOctave / slope;
  }

  Team& team_;
  const Row& row_;
  Workspace& space_;
  Atoms& atoms_;
  List list_;
  unsigned count_ = 0;
  float limit_ = 0.0f;
};

}  // namespace cukit
