// A row of logits, distributed over the warps of a block or of a cluster.
//
// An atom is ATOM * 32 * VEC consecutive tokens, a number that depends on the vocabulary size alone
// (_plan.py). Its sum of exponentials is an integer: the same for any split of the row.
//
// Each warp has consecutive atoms, and its lane l holds vectors l, l + 32, ... of them, so that a
// prefix sum over warps is a prefix sum over tokens.
//
// Macros: DTYPE; VEC, logits per access, a divisor of the vocabulary size; THREADS, CLUSTER;
// RESIDENT 0|1: keep the row in shared memory, as floats; PENALIZED 0|1; ATOM, vectors per lane in
// an atom.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/max_nan.cuh"
#include "common/types.cuh"
#include "sampling/parameters.cuh"
#include "sampling/team.cuh"
#include "sampling/weight.cuh"

namespace cukit {

// Penalties on the logits of tokens that occurred before. `counts` holds, for each token of the vocabulary,
// how often it was generated; the highest bit is set if the token is in the history at all (count_tokens.cu).
struct Penalties {
  const int* counts;  // [vocab_size], with PENALIZED
  float repetition, presence, frequency;

  CUKIT_DEVICE bool valid() const {
    return repetition > 0.0f && repetition < infinity() && fabsf(presence) < infinity() &&
           fabsf(frequency) < infinity();
  }

  // Keskar et al., arXiv:1909.05858 (repetition).
  CUKIT_DEVICE float apply(float x, int column) const {
    const int count = counts[column];
    if (count == 0) return x;
    x = x > 0.0f ? x / repetition : x * repetition;
    const int drawn = count & 0x7fffffff;
    if (drawn > 0) x -= presence + frequency * static_cast<float>(drawn);
    return x;
  }
};

constexpr int kAtomTokens = ATOM * kWarpSize * VEC;
// The number of accesses by which a lane loads 8 logits; fewer if an atom has fewer.
constexpr int kAccessesOf8 = VEC >= 8 || ATOM == 1 ? 1 : 8 / VEC < ATOM ? 8 / VEC : ATOM;

constexpr int kAtomScale = 45;

// A sum of terms 2^((x - largest) slope) in units of 2^-kAtomScale. Each term is rounded to an
// integer high * 2^23 + low before it is added, so that the sum does not depend on the order. A
// term has up to 24 significant bits.
class TermSum {
 public:
  CUKIT_DEVICE void add(float term) {
    const float upper = term + kHigh;
    const float rest = term - (upper - kHigh);
    high_ += __float_as_uint(upper) - kHighBits;
    low_ += static_cast<int>(__float_as_uint(rest + kLow) - kLowBits);
  }
  CUKIT_DEVICE uint64 value() const {
    return (static_cast<uint64>(high_) << 23) + static_cast<uint64>(static_cast<long long>(low_));
  }

 private:
  // Adding kHigh rounds to a multiple of 2^-22, adding kLow to a multiple of 2^-45.
  static constexpr float kHigh = 3.0f, kLow = 3.5762786865234375e-7f;
  static constexpr unsigned kHighBits = 0x40400000u, kLowBits = 0x34c00000u;
  unsigned high_ = 0;
  int low_ = 0;
};

// The largest logit of an atom, and the sum of its terms relative to that logit.
struct AtomSum {
  float largest;
  uint64 sum;

  // The weight of the atom in units of 2^-kScale of the weight of the row's largest logit.
  CUKIT_DEVICE uint64 weight(float row_largest, float slope) const {
    if (sum == 0) return 0;
    const double share = exp2f((largest - row_largest) * slope);
    constexpr double kUnits = 1.0 / (1ull << (kAtomScale - kScale));
    return static_cast<uint64>(static_cast<double>(sum) * share * kUnits);
  }
};

class Row {
 public:
  struct Atom {
    Vec<element_t, VEC> vectors[ATOM];
  };

  // values: shared memory for the logits of the block's atoms, with RESIDENT.
  CUKIT_DEVICE Row(const element_t* logits, const Penalties& penalties, float* values, int rank,
                   const SampleParameters& p)
      : logits_(logits), values_(values), penalties_(penalties), columns_(p.vocab_size) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int share = atoms_per_block();
    rounds_ = (share + kWarps - 1) / kWarps;
    const int first = rank * share + warp * rounds_;
    const int end = min(min((rank + 1) * share, atoms()), first + rounds_);
    iterations_ = max(end - first, 0) * ATOM;
    first_ = first * kAtomTokens + lane * VEC;
    values_ += (warp * rounds_ * kAtomTokens + lane * kPart);
  }

  CUKIT_DEVICE static int atoms_in(int columns) { return (columns + kAtomTokens - 1) / kAtomTokens; }
  CUKIT_DEVICE static int atoms_per_block(int columns) {
    return (atoms_in(columns) + CLUSTER - 1) / CLUSTER;
  }
  CUKIT_DEVICE int atoms() const { return atoms_in(columns_); }
  CUKIT_DEVICE int atoms_per_block() const { return atoms_per_block(columns_); }
  // The maximum number of atoms per warp.
  CUKIT_DEVICE int rounds() const { return rounds_; }

  // Accesses of this warp.
  CUKIT_DEVICE int iterations() const { return iterations_; }
  CUKIT_DEVICE int columns() const { return columns_; }
  CUKIT_DEVICE int column(int i) const { return first_ + i * (kWarpSize * VEC); }

  // This thread's logits of access i, from column(i) on; -infinity past the end of the vocabulary.
  CUKIT_DEVICE void fetch(float (&x)[VEC], int i) const {
    if constexpr (RESIDENT) {
#pragma unroll
      for (int j = 0; j < VEC; j += kPart) {
        Vec<float, kPart> part = *slot(i, j);
#pragma unroll
        for (int k = 0; k < kPart; ++k) x[j + k] = part[k];
      }
    } else {
      Vec<element_t, VEC> vector;
      const int at = column(i);
      if (at < columns_) load(vector, logits_ + at);
      convert(x, vector, at);
    }
  }

  // Calls body(logit, token) for this thread's tokens in order.
  template <typename Body>
  CUKIT_DEVICE void each(const Body& body) const {
    if constexpr (RESIDENT) {
#pragma unroll 1
      for (int i = 0; i < iterations_; ++i) {
        float x[VEC];
        fetch(x, i);
#pragma unroll
        for (int j = 0; j < VEC; ++j) body(x[j], column(i) + j);
      }
    } else {
#pragma unroll 1
      for (int begin = 0; begin < iterations_; begin += kBatch) {
        Vec<element_t, VEC> batch[kBatch];
        load_batch(batch, begin);
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if (begin + u >= iterations_) break;
          float x[VEC];
          convert(x, batch[u], column(begin + u));
#pragma unroll
          for (int j = 0; j < VEC; ++j) body(x[j], column(begin + u) + j);
        }
      }
    }
  }

  // The first token of this lane in an atom, and the first token of its vector u.
  CUKIT_DEVICE int first_of(int atom) const {
    return atom * kAtomTokens + static_cast<int>(threadIdx.x) % kWarpSize * VEC;
  }
  CUKIT_DEVICE int column_of(int first, int u) const { return first + u * (kWarpSize * VEC); }

  // Loads this lane's logits of an atom; -infinity past the end of the vocabulary.
  CUKIT_DEVICE void load_atom(Atom& atom, int first) const {
    if (first - first % kAtomTokens + kAtomTokens <= columns_) {
#pragma unroll
      for (int u = 0; u < ATOM; ++u) load(atom.vectors[u], logits_ + column_of(first, u));
      return;
    }
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      const int at = column_of(first, u);
#pragma unroll
      for (int j = 0; j < VEC; ++j) atom.vectors[u][j] = from_float<element_t>(-infinity());
      if (at < columns_) load(atom.vectors[u], logits_ + at);
    }
  }

  // The logits of vector u of an atom, with penalties. Unlike fetch(), keeps -0.
  CUKIT_DEVICE void values_of(float (&x)[VEC], const Atom& atom, int u, int first) const {
    to_floats(x, atom.vectors[u]);
    if constexpr (PENALIZED) {
      const int at = column_of(first, u);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        if (at < columns_) x[j] = penalties_.apply(x[j], at + j);
      }
    }
  }

  // Stores the logits of this warp's atom of a round, for fetch() and each().
  CUKIT_DEVICE void keep(int round, const Atom& atom, int first) const {
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      float x[VEC];
      values_of(x, atom, u, first);
#pragma unroll
      for (int j = 0; j < VEC; j += kPart) {
        Vec<float, kPart> part;
#pragma unroll
        for (int k = 0; k < kPart; ++k) part[k] = x[j + k] + 0.0f;
        *slot(round * ATOM + u, j) = part;
      }
    }
  }

  // The largest of this lane's logits of an atom; NaN if any of them is NaN.
  CUKIT_DEVICE float largest_of(const Atom& atom, int first) const {
    float largest = -infinity();
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      float x[VEC];
      values_of(x, atom, u, first);
      float access_max = x[0];
#pragma unroll
      for (int j = 1; j < VEC; ++j) access_max = max_nan(access_max, x[j]);
      largest = max_nan(largest, access_max);
    }
    return largest;
  }

  // The sum of an atom, returned in every lane. `largest`: the maximum of this lane's logits.
  CUKIT_DEVICE AtomSum sum_of(const Atom& atom, int first, float largest, float slope) const {
    AtomSum all;
    all.largest = logit_of(__reduce_min_sync(kFullMask, descending_key(largest + 0.0f)));
    TermSum terms;
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      float x[VEC];
      values_of(x, atom, u, first);
#pragma unroll
      for (int j = 0; j < VEC; ++j) terms.add(exp2f((x[j] - all.largest) * slope));
    }
    const uint64 sum = warp_sum(terms.value());
    all.sum = all.largest > -infinity() ? sum : 0;
    return all;
  }

  // The logit of any token, loaded from global memory.
  CUKIT_DEVICE float at(int token) const {
    const float x = to_float(logits_[token]) + 0.0f;
    return PENALIZED ? penalties_.apply(x, token) : x;
  }

 private:
  static constexpr int kBatch = 4;
  static constexpr int kPart = VEC < 4 ? VEC : 4;

  CUKIT_DEVICE void load_batch(Vec<element_t, VEC> (&batch)[kBatch], int begin) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int at = column(begin + u);
      if (begin + u < iterations_ && at < columns_) load<Cache::Kept>(batch[u], logits_ + at);
    }
  }

  // Maps -0 to 0, so that the two have equal keys.
  CUKIT_DEVICE void convert(float (&x)[VEC], const Vec<element_t, VEC>& from, int at) const {
    const bool exists = at < columns_;
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] = -infinity();
    if (!exists) return;
    to_floats(x, from);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x[j] += 0.0f;
      if constexpr (PENALIZED) x[j] = penalties_.apply(x[j], at + j);
    }
  }

  CUKIT_DEVICE Vec<float, kPart>* slot(int i, int j) const {
    return reinterpret_cast<Vec<float, kPart>*>(values_) + (i * (VEC / kPart) + j / kPart) * kWarpSize;
  }

  const element_t* logits_;
  float* values_;
  Penalties penalties_;
  int columns_, rounds_, iterations_, first_;
};

}  // namespace cukit
