// The atoms of a row (row.cuh), distributed over the warps. One pass over the row yields the sums
// of all atoms, and thus the total weight of the row. Without truncation a draw needs no second
// pass: the random number selects an atom, and one warp rereads that atom's logits and selects the
// token. A draw with other weights, such as the weights of only the tokens above a cut, makes
// another pass over the row, which replaces the sums.
#pragma once

#include "common/platform.cuh"
#include "sampling/row.cuh"
#include "sampling/team.cuh"

namespace cukit {

class Atoms {
 public:
  // sums: shared memory for the atoms of a block; ATOM_BYTES in cukit/sampling/_plan.py.
  CUKIT_DEVICE Atoms(Team& team, const Row& row, AtomSum* sums)
      : team_(team), row_(row), sums_(sums) {
    begin_ = team.rank() * row.atoms_per_block();
    end_ = min(begin_ + row.atoms_per_block(), row.atoms());
  }

  // Calls visit(round, atom, vectors, first, lane_max) for each atom of this warp. vectors: this
  // lane's logits of the atom; first: the first token of this lane; lane_max: the largest logit of
  // this lane. In a round without an atom, `lane_max` is -infinity and `atom` is -1.
  // spread: each warp has consecutive atoms, so that the atoms of a round are spread over the row.
  // Otherwise the atoms of a round are consecutive.
  template <bool spread, typename Visit>
  CUKIT_DEVICE void each(const Visit& visit) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll 1
    for (int i = 0; i < row_.rounds(); ++i) {
      const int atom = begin_ + (spread ? warp * row_.rounds() + i : i * kWarps + warp);
      const int first = row_.first_of(atom);
      Row::Atom vectors;
      float lane_max = -infinity();
      if (atom < end_) {
        row_.load_atom(vectors, first);
        lane_max = row_.largest_of(vectors, first);
      }
      visit(i, atom < end_ ? atom : -1, vectors, first, lane_max);
    }
  }

  // Stores the sum of an atom, for total() and draw().
  CUKIT_DEVICE void weigh(int atom, const Row::Atom& vectors, int first, float lane_max,
                          float slope) {
    const AtomSum sum = row_.sum_of(vectors, first, lane_max, slope);
    if (threadIdx.x % kWarpSize == 0) sums_[atom - begin_] = sum;
  }

  // Leaves a token out of total() and draw(). `x`: its logit. Called by all threads, after total().
  CUKIT_DEVICE void exclude(float x, int token, float slope) {
    excluded_ = token;
    const int atom = token / kAtomTokens;
    if (threadIdx.x != 0 || atom < begin_ || atom >= end_) return;
    AtomSum& sum = sums_[atom - begin_];
    TermSum term;
    term.add(exp2f((x - sum.largest) * slope));
    if (sum.sum > 0) sum.sum -= term.value();
  }

  // Sums the weights weigh(logit, token, other) over the row, and replaces the sums of the atoms,
  // for find(). `other` is the result of weigh.other(token), which is loaded before the weights are
  // computed.
  template <typename WeightOf>
  CUKIT_DEVICE Team::Sum sum(const WeightOf& weigh) {
    uint64 own = 0;
#pragma unroll 1
    for (int begin = 0; begin < row_.iterations(); begin += ATOM) {
      uint64 sum = 0;
#pragma unroll 1
      for (int i = begin; i < begin + ATOM; i += kAccessesOf8) {
        uint64 weights[kAccessesOf8][VEC];
        float x[kAccessesOf8][VEC];
        load_weights(weights, x, i, weigh);
#pragma unroll
        for (int u = 0; u < kAccessesOf8; ++u) {
#pragma unroll
          for (int j = 0; j < VEC; ++j) sum += weights[u][j];
        }
      }
      own += sum;
      replace(own_atom(begin), warp_sum(sum));
    }
    return team_.sum(own);
  }

  // Calls winner(logit, token) for the token whose range of prefix sums of sum(weigh) contains
  // `place`.
  template <typename WeightOf, typename Winner>
  CUKIT_DEVICE void find(const Team::Sum& sum, uint64 place, const WeightOf& weigh,
                         const Winner& winner) const {
    if (place < sum.before) return;
    uint64 before = sum.before;
    int begin = 0;
#pragma unroll 1
    for (; begin < row_.iterations(); begin += ATOM) {
      const uint64 upto = before + replaced(own_atom(begin));
      if (place < upto) break;
      before = upto;
    }
    if (begin >= row_.iterations()) return;
#pragma unroll 1
    for (int i = begin; i < begin + ATOM; ++i) {
      uint64 weights[1][VEC], own = 0;
      float x[1][VEC];
      load_weights(weights, x, i, weigh);
#pragma unroll
      for (int j = 0; j < VEC; ++j) own += weights[0][j];
      const uint64 upto = warp_scan(own);
      uint64 mine = before + upto - own;
      if (mine <= place && place < mine + own) {
        float logit = 0.0f;
        int column = 0;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          if (mine <= place && place < mine + weights[0][j]) {
            logit = x[0][j];
            column = row_.column(i) + j;
          }
          mine += weights[0][j];
        }
        winner(logit, column);
      }
      before += __shfl_sync(kFullMask, upto, kWarpSize - 1);
      if (before > place) return;
    }
  }

  // Whether sum() includes all tokens.
  CUKIT_DEVICE bool complete() const { return true; }

  // Replaces the sum of an atom. After this, total() and draw() must not be called.
  CUKIT_DEVICE void replace(int atom, uint64 sum) {
    if (threadIdx.x % kWarpSize == 0) sums_[atom - begin_].sum = sum;
  }
  CUKIT_DEVICE uint64 replaced(int atom) const { return sums_[atom - begin_].sum; }

  // The weight of the row, once all atoms are weighed.
  CUKIT_DEVICE Team::Sum total(float largest, float slope) {
    __syncthreads();
    uint64 own = 0;
    each_sum([&](int, const AtomSum& sum) { own += sum.weight(largest, slope); });
    return team_.sum(own);
  }

  // Calls winner(logit, token) for the token whose range of prefix sums contains `place`. `sum`:
  // the result of total().
  template <typename Winner>
  CUKIT_DEVICE void draw(const Team::Sum& sum, uint64 place, float largest, float slope,
                         const Winner& winner) const {
    uint64 own = 0;
    each_sum([&](int, const AtomSum& atom) { own += atom.weight(largest, slope); });
    uint64 before = sum.before + warp_scan(own) - own;
    int chosen = 0;
    uint64 left = 0;
    bool here = false;
    each_sum([&](int i, const AtomSum& atom) {
      const uint64 weight = atom.weight(largest, slope);
      if (before <= place && place < before + weight) {
        here = true;
        chosen = i;
        left = place - before;
      }
      before += weight;
    });
    const unsigned finder = __ballot_sync(kFullMask, here);
    if (finder == 0) return;
    const int lane = __ffs(static_cast<int>(finder)) - 1;
    chosen = __shfl_sync(kFullMask, chosen, lane);
    left = __shfl_sync(kFullMask, left, lane);
    const AtomSum& atom = sums_[chosen];
    const double scale =
        static_cast<double>(atom.sum) / static_cast<double>(atom.weight(largest, slope));
    left = min(static_cast<uint64>(static_cast<double>(left) * scale), atom.sum - 1);
    draw_within(begin_ + chosen, atom, left, slope, winner);
  }

 private:
  // Calls body(index, sum) for this thread's consecutive atoms.
  template <typename Body>
  CUKIT_DEVICE void each_sum(const Body& body) const {
    const int count = end_ - begin_;
    const int per = (row_.atoms_per_block() + THREADS - 1) / THREADS;
    const int from = static_cast<int>(threadIdx.x) * per;
#pragma unroll 1
    for (int i = from; i < min(from + per, count); ++i) body(i, sums_[i]);
  }

  // Each lane sums consecutive tokens. The tokens of the lane whose sum contains `place` are then distributed over all
  // lanes.
  template <typename Winner>
  CUKIT_DEVICE void draw_within(int number, const AtomSum& atom, uint64 place, float slope,
                                const Winner& winner) const {
    constexpr int kPer = kAtomTokens / kWarpSize;
    static_assert(kPer <= kWarpSize, "a lane for each token of a lane");
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int first = number * kAtomTokens;
    const auto logit = [&](int token) {
      return token < row_.columns() && token != excluded_ ? row_.at(token) : -infinity();
    };
    TermSum terms;
#pragma unroll 8
    for (int j = 0; j < kPer; ++j) {
      terms.add(exp2f((logit(first + lane * kPer + j) - atom.largest) * slope));
    }
    uint64 own = terms.value();
    uint64 before = warp_scan(own) - own;
    const unsigned finder = __ballot_sync(kFullMask, before <= place && place < before + own);
    const int found = __ffs(static_cast<int>(finder)) - 1;
    place -= __shfl_sync(kFullMask, before, found);
    const int token = first + found * kPer + lane;
    const float x = lane < kPer ? logit(token) : -infinity();
    TermSum term;
    term.add(exp2f((x - atom.largest) * slope));
    own = term.value();
    before = warp_scan(own) - own;
    if (before <= place && place < before + own) winner(x, token);
  }

  // The atom of this warp that begins with access i.
  CUKIT_DEVICE int own_atom(int i) const {
    return begin_ + static_cast<int>(threadIdx.x) / kWarpSize * row_.rounds() + i / ATOM;
  }

  // The logits and weights of this thread's N accesses from i on. All loads come first, so that they overlap.
  template <int N, typename WeightOf>
  CUKIT_DEVICE void load_weights(uint64 (&weights)[N][VEC], float (&x)[N][VEC], int i,
                                 const WeightOf& weigh) const {
    float other[N][VEC];
#pragma unroll
    for (int u = 0; u < N; ++u) {
      row_.fetch(x[u], i + u);
      const bool exists = row_.column(i + u) < row_.columns();
#pragma unroll
      for (int j = 0; j < VEC; ++j) other[u][j] = exists ? weigh.other(row_.column(i + u) + j) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < N; ++u) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) weights[u][j] = weigh(x[u][j], row_.column(i + u) + j, other[u][j]);
    }
  }

  Team& team_;
  const Row& row_;
  AtomSum* sums_;
  int begin_, end_;
  int excluded_ = -1;
};

}  // namespace cukit
