// Two sweeps over a row of logits: its mass, and what is written in the logits' place.
//
// Macros: those of common/vocabulary_row.cuh.
#pragma once

#include "common/platform.cuh"
#include "common/vocabulary_row.cuh"

namespace cukit {

class LogitRow {
 public:
  using Vector = Vec<element_t, VEC>;
  using Single = Vec<element_t, 1>;

  static constexpr int kInFlight = 4;  // accesses that a thread issues before it uses the first
  static constexpr int kAhead = 3;     // batches of those on their way to shared memory

  RowSlice slice;

  // cache: CACHED * THREADS vectors of shared memory.
  CUKIT_DEVICE LogitRow(const element_t* logits, Vector* cache, long long row, long long row_stride,
                        int columns, int rank)
      : slice(row, row_stride, columns, rank), logits_(logits), mine_(cache + threadIdx.x),
        kept_(min(slice.count, CACHED)) {
    if (has_loose()) loose_[0][0] = logits[slice.base + slice.loose_column];
  }

  // This thread's share of sum_v 2^(scale z_v).
  CUKIT_DEVICE Mass mass(float scale) const {
    Mass mass;
    const auto add_batch = [&](const Batch& batch, auto& vectors) {
#pragma unroll
      for (int i = 1; i < kInFlight; ++i) {
        if (!batch.has(i)) vectors[i] = vectors[0];
      }
      mass.cover(extreme<Largest>(vectors), scale);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (batch.has(i)) add(mass, vectors[i], scale);
      }
    };
    const auto copy = [&](int k) { slice.copy(mine_ + k * THREADS, logits_, k); };
    copied_forwards<kInFlight, kAhead>(kept_, copy, [&](const Batch& batch) {
      Vector vectors[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (batch.has(i)) vectors[i] = mine_[(batch.first + i) * THREADS];
      }
      add_batch(batch, vectors);
    });
    forwards<kInFlight>(kept_, slice.count, [&](const Batch& batch) {
      Vector vectors[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (batch.has(i)) slice.read(vectors[i], logits_, batch.first + i);
      }
      add_batch(batch, vectors);
    });
    if (has_loose()) {
      mass.cover(extreme<Largest>(loose_), scale);
      add(mass, loose_[0], scale);
    }
    return mass;
  }

  // to_v = 2^(scale z_v) in units of `mass`, times `factor`; `to` may be the logits.
  CUKIT_DEVICE void write_softmax(element_t* to, const Mass& mass, float scale, float factor) {
    backwards<kInFlight>(slice.count, [&](const Batch& batch) {
      Vector vectors[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) continue;
        if (k < kept_) {
          vectors[i] = mine_[k * THREADS];
        } else {
          slice.read_again(vectors[i], logits_, k);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) continue;
        scale_softmax(vectors[i], mass, scale, factor);
        slice.write(to, k, vectors[i]);
      }
    });
    if (has_loose()) {
      scale_softmax(loose_[0], mass, scale, factor);
      to[slice.base + slice.loose_column] = loose_[0][0];
    }
  }

 private:
  CUKIT_DEVICE bool has_loose() const { return slice.loose_column >= 0; }

  // Adds logits that are covered.
  template <int N>
  CUKIT_DEVICE static void add(Mass& mass, const Vec<element_t, N>& logits, float scale) {
    float z[N];
    to_floats(z, logits);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += mass.term(z[j], scale);
    mass.sum += sum;
  }

  template <int N>
  CUKIT_DEVICE static void scale_softmax(Vec<element_t, N>& logits, const Mass& mass, float scale,
                                         float factor) {
    float z[N];
    to_floats(z, logits);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = mass.term(z[j], scale) * factor;
    from_floats(logits, z);
  }

  const element_t* logits_;
  Vector* mine_;
  int kept_;
  Single loose_[1];
};

}  // namespace cukit
