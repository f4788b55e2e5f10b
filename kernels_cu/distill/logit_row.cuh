// Two sweeps over a row of logits: sums of exponentials (masses), then a softmax that may overwrite
// the logits.
//
// Macros: those of common/vocabulary_row.cuh and distill/logits.cuh.
#pragma once

#include "common/platform.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/logits.cuh"
#include "distill/parameters.cuh"

namespace cukit {

// The weight of a row: 0 if it is ignored.
CUKIT_DEVICE float row_weight(const float* token_weights, long long row, bool ignored) {
  return ignored ? 0.0f : token_weights != nullptr ? token_weights[row] : 1.0f;
}

// Zeroes the padding columns in a row of the gradient.
CUKIT_DEVICE void clear_padding(element_t* grad, long long row, const LogitRows& rows, int rank) {
  const int first = rows.columns + rank * THREADS + static_cast<int>(threadIdx.x);
  for (int column = first; column < rows.width; column += CLUSTER * THREADS) {
    grad[row * rows.row_stride + column] = from_float<element_t>(0.0f);
  }
}

class LogitRow {
 public:
  using Vector = Vec<element_t, VEC>;
  using Single = Vec<element_t, 1>;

  static constexpr int kInFlight = 4;  // loads that a thread issues before it uses the first
  static constexpr int kAhead = 3;     // batches of kInFlight vectors in flight to shared memory

  RowSlice slice;

  // cache: CACHED * THREADS vectors of shared memory.
  CUKIT_DEVICE LogitRow(const element_t* values, const Logits& logits, Vector* cache,
                        long long row, const LogitRows& rows, int rank)
      : slice(row, rows.row_stride, rows.columns, rank), values_(values), logits_(logits),
        mine_(cache + threadIdx.x), kept_(min(slice.count, CACHED)) {
    if (has_scalar()) scalar_[0][0] = values_[slice.base + slice.scalar_column];
  }

  // Adds this thread's part of sum_v 2^(scale z_v) to a mass, for each scale.
  template <int Masses>
  CUKIT_DEVICE void add_to(Mass (&masses)[Masses], const float (&scales)[Masses]) const {
    const auto add_batch = [&](const Batch& batch, auto& vectors) {
#pragma unroll
      for (int i = 1; i < kInFlight; ++i) {
        if (!batch.has(i)) vectors[i] = vectors[0];
      }
      cover(masses, scales, vectors);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (batch.has(i)) add(masses, scales, vectors[i]);
      }
    };
    const auto copy = [&](int k) { slice.copy(mine_ + k * THREADS, values_, k); };
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
        if (batch.has(i)) slice.read(vectors[i], values_, batch.first + i);
      }
      add_batch(batch, vectors);
    });
    if (has_scalar()) {
      cover(masses, scales, scalar_);
      add(masses, scales, scalar_[0]);
    }
  }

  // to_v = dz_v / dx_v * sum over the masses of factor * 2^(scale z_v - reference); `to`: a
  // tensor with the layout of the logits, or the logits themselves.
  template <int Masses>
  CUKIT_DEVICE void write_softmax(element_t* to, const Mass (&masses)[Masses],
                                  const float (&scales)[Masses], const float (&factors)[Masses]) {
    backwards<kInFlight>(slice.count, [&](const Batch& batch) {
      Vector vectors[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) continue;
        if (k < kept_) {
          vectors[i] = mine_[k * THREADS];
        } else {
          slice.read_again(vectors[i], values_, k);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) continue;
        replace(vectors[i], masses, scales, factors);
        slice.write(to, k, vectors[i]);
      }
    });
    if (has_scalar()) {
      replace(scalar_[0], masses, scales, factors);
      to[slice.base + slice.scalar_column] = scalar_[0][0];
    }
  }

 private:
  CUKIT_DEVICE bool has_scalar() const { return slice.scalar_column >= 0; }

  template <int Masses, int N, int Batch>
  CUKIT_DEVICE void cover(Mass (&masses)[Masses], const float (&scales)[Masses],
                          const Vec<element_t, N> (&vectors)[Batch]) const {
    const float top = logits_.of(extreme<Largest>(vectors));
#pragma unroll
    for (int m = 0; m < Masses; ++m) masses[m].cover(top, scales[m]);
  }

  // Adds elements that have been passed to `cover`.
  template <int Masses, int N>
  CUKIT_DEVICE void add(Mass (&masses)[Masses], const float (&scales)[Masses],
                        const Vec<element_t, N>& vector) const {
    float z[N];
    logits_.load(z, vector);
#pragma unroll
    for (int m = 0; m < Masses; ++m) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) sum += masses[m].term(z[j], scales[m]);
      masses[m].sum += sum;
    }
  }

  template <int Masses, int N>
  CUKIT_DEVICE void replace(Vec<element_t, N>& vector, const Mass (&masses)[Masses],
                            const float (&scales)[Masses], const float (&factors)[Masses]) const {
    float z[N], g[N];
    logits_.load(z, vector);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      g[j] = masses[0].term(z[j], scales[0]) * factors[0];
#pragma unroll
      for (int m = 1; m < Masses; ++m) {
        g[j] = fmaf(masses[m].term(z[j], scales[m]), factors[m], g[j]);
      }
    }
    logits_.chain(g, z);
    from_floats(vector, g);
  }

  const element_t* values_;
  Logits logits_;
  Vector* mine_;
  int kept_;
  Single scalar_[1];
};

}  // namespace cukit
