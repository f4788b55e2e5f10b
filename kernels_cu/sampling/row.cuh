// A row of logits, shared out over the warps of one block or of a cluster.
//
// Each warp has a run of neighbouring tokens, of which lane l takes vectors l, l + 32, ...: sums over warps
// in their order are sums over tokens in theirs.
//
// Macros: DTYPE; VEC, logits an access, a divisor of the vocabulary; THREADS, CLUSTER; RESIDENT 0|1: the
// row stays in shared memory, as floats, once it has been read; PENALIZED 0|1.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"
#include "sampling/parameters.cuh"
#include "sampling/team.cuh"
#include "sampling/weight.cuh"

namespace cukit {

// Lowers the logits of tokens that a text holds already. `counts` has, for each token of the vocabulary,
// how often it was drawn; the highest bit is set where it was in the text at all.
struct Penalties {
  const int* counts;  // [vocab_size], with PENALIZED
  float repetition, presence, frequency;

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

class Row {
 public:
  // values: shared memory for iterations * THREADS * VEC floats, with RESIDENT.
  CUKIT_DEVICE Row(const element_t* logits, const Penalties& penalties, float* values, int rank,
                   const SampleParameters& p)
      : logits_(logits),
        values_(values),
        penalties_(penalties),
        columns_(p.vocab_size),
        iterations_(p.iterations) {
    const int warp = rank * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
    first_ = (warp * iterations_ * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize) * VEC;
  }

  CUKIT_DEVICE int iterations() const { return iterations_; }
  CUKIT_DEVICE int columns() const { return columns_; }
  CUKIT_DEVICE int column(int i) const { return first_ + i * (kWarpSize * VEC); }

  // Reads the row; returns the least key among this thread's logits, that of its largest.
  CUKIT_DEVICE unsigned read() {
    unsigned least = descending_key(-infinity());
#pragma unroll 1
    for (int begin = 0; begin < iterations_; begin += kBatch) {
      Vec<element_t, VEC> batch[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int at = column(begin + u);
        if (begin + u < iterations_ && at < columns_) load<Cache::Kept>(batch[u], logits_ + at);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (begin + u >= iterations_) break;
        float x[VEC];
        convert(x, batch[u], column(begin + u));
#pragma unroll
        for (int j = 0; j < VEC; ++j) least = min(least, descending_key(x[j]));
        if constexpr (RESIDENT) keep(begin + u, x);
      }
    }
    return least;
  }

  // This thread's logits of one access, from column(i) on; -infinity behind the vocabulary.
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
#pragma unroll 1
    for (int i = 0; i < iterations_; ++i) {
      float x[VEC];
      fetch(x, i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) body(x[j], column(i) + j);
    }
  }

  // One logit, whoever has it.
  CUKIT_DEVICE float at(int token) const {
    const float x = to_float(logits_[token]) + 0.0f;
    return PENALIZED ? penalties_.apply(x, token) : x;
  }

 private:
  static constexpr int kBatch = 4;
  static constexpr int kPart = VEC < 4 ? VEC : 4;

  // -0 becomes 0: the two are equal.
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
    return reinterpret_cast<Vec<float, kPart>*>(values_) +
           (i * (VEC / kPart) + j / kPart) * THREADS + threadIdx.x;
  }

  CUKIT_DEVICE void keep(int i, const float (&x)[VEC]) const {
#pragma unroll
    for (int j = 0; j < VEC; j += kPart) {
      Vec<float, kPart> part;
#pragma unroll
      for (int k = 0; k < kPart; ++k) part[k] = x[j + k];
      *slot(i, j) = part;
    }
  }

  const element_t* logits_;
  float* values_;
  Penalties penalties_;
  int columns_, iterations_, first_;
};

}  // namespace cukit
