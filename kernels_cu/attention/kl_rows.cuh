// The KL divergence of two attention distributions, per row, accumulated over tiles of both models'
// scores.
//
//   e = exp2(x - top), x = a t, u = b s
//   (t, s: products Q K^T of teacher and student; a, b: their scale * log2(e) / temperature)
//   cross_t += e t     cross_s += e s     sum_t += e     sum_s += exp2(u - top_s)
//   KL / ln 2 = (a cross_t - b cross_s) / sum_t - lse_t + lse_s,   lse = top + log2(sum)
//
// An lse that the caller passes replaces `top`. With the student's lse, sum_s is not needed. With
// the teacher's lse,
//   KL / ln 2 = a cross_t - b cross_s - sum_t (lse_t - lse_s) + (1 - sum_t) log2(e),
// in which an error of lse_t has only a second-order effect. PRECISE, with both lse given: KL is
// the sum of p (expm1(-d) + d), d = ln p - ln q. No term is negative, so no terms cancel: the
// relative error is that of float32, however small the divergence.
//
// Masked scores are kMaskedScore, not -infinity: x - u is then finite, and e is 0.
// A lane holds rows r and r + 8: element 4 n + 2 half + i of its scores is in row r + 8 half. A
// lane's sums are over its own columns until finish(). Each tile is summed separately before it is
// added, which reduces the rounding error of long rows.
//
// Macros: KNOWN_T, KNOWN_S 0|1: the lse of teacher, student is given; KNOWN_S 2: the student's
//   softmax is computed elsewhere and passed to take_student(); PRECISE 0|1: needs both.
#pragma once

#include "common/platform.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/types.cuh"

namespace cukit {

static_assert(!PRECISE || (KNOWN_T && KNOWN_S == 1), "PRECISE needs the lse of both models");

constexpr float kMaskedScore = -1e30f;
constexpr float kNoScore = -1e29f;  // the maximum before the first visible key

// Replaces the -infinity that mask_keys stores by kMaskedScore. NaN is kept.
template <int N>
CUKIT_DEVICE void make_finite(float (&scores)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
    if (scores[e] == -infinity()) scores[e] = kMaskedScore;
  }
}

// Row arrays: [batch, heads, seq_q]; VARLEN: [heads, total_q].
struct KlRowArrays {
  const float* known_t;  // KNOWN_T: the teacher's lse, natural logarithm
  const float* known_s;  // KNOWN_S 1: the student's
  float* kl;             // or null
  float* lse_t;          // or null
  float* lse_s;          // or null
};

class KlRows {
 public:
  KlRows() = default;
  // `first`: index of the lane's first row; rows from `rows_left` on do not exist.
  CUKIT_DEVICE KlRows(const KlRowArrays& arrays, long long first, int rows_left, float scale_t,
                      float scale_s)
      : scale_t_(scale_t), scale_s_(scale_s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = 8 * half < rows_left;
      teacher_.max[half] = start<KNOWN_T>(arrays.known_t + first + 8 * half, exists);
      student_.max[half] = start<KNOWN_S == 1>(arrays.known_s + first + 8 * half, exists);
      teacher_.sum[half] = student_.sum[half] = cross_t_[half] = cross_s_[half] = 0.0f;
    }
  }

  // Adds the teacher's products, and replaces them by their weights e.
  template <int N>
  CUKIT_DEVICE void add_teacher(float (&t)[N]) {
    if constexpr (!KNOWN_T) {
      float shrink[2];
      if (update_maxima(teacher_, shrink, t, scale_t_)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          cross_t_[half] *= shrink[half];
          cross_s_[half] *= shrink[half];
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = KNOWN_T ? -teacher_.max[half] : -teacher_.max[half] * scale_t_;
      float sum[2] = {}, cross[2] = {};
#pragma unroll
      for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& own = t[4 * n + 2 * half + i];
          const float e = exp2f(fmaf(own, scale_t_, shift));
          sum[i] += e;
          cross[i] = fmaf(e, own, cross[i]);
          own = e;
        }
      teacher_.sum[half] += sum[0] + sum[1];
      cross_t_[half] += cross[0] + cross[1];
    }
  }

  // Adds the student's products times the teacher's weights `e`. Infinite: products may be
  // -infinity, which counts as kMaskedScore.
  template <bool Infinite = false, int N>
  CUKIT_DEVICE void add_cross(const float (&e)[N], const float (&s)[N]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float cross[2] = {};
#pragma unroll
      for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * n + 2 * half + i;
          const float own = Infinite && s[at] == -infinity() ? kMaskedScore : s[at];
          cross[i] = fmaf(e[at], own, cross[i]);
        }
      cross_s_[half] += cross[0] + cross[1];
    }
  }

  // Adds the student's exponentials.
  template <int N>
  CUKIT_DEVICE void add_student(const float (&s)[N]) {
    if constexpr (!KNOWN_S) {
      float shrink[2];
      update_maxima(student_, shrink, s, scale_s_);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = -student_.max[half] * scale_s_;
        float sum[2] = {};
#pragma unroll
        for (int n = 0; n < N / 4; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            sum[i] += exp2f(fmaf(s[4 * n + 2 * half + i], scale_s_, shift));
          }
        student_.sum[half] += sum[0] + sum[1];
      }
    }
  }

  // PRECISE: used instead of add_teacher, add_cross and add_student.
  template <int N>
  CUKIT_DEVICE void add_precise(const float (&t)[N], const float (&s)[N]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum[2] = {};
#pragma unroll
      for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * n + 2 * half + i;
          sum[i] += precise_term(fmaf(t[at], scale_t_, -teacher_.max[half]),
                                 fmaf(s[at], scale_s_, -student_.max[half]));
        }
      cross_t_[half] += sum[0] + sum[1];
    }
  }

  // Adds one tile.
  template <int N>
  CUKIT_DEVICE void add(float (&t)[N], const float (&s)[N]) {
    if constexpr (PRECISE) {
      add_precise(t, s);
    } else {
      add_teacher(t);
      add_cross(t, s);
      add_student(s);
    }
  }

  // KNOWN_S 2: the student's maxima and sums, before finish().
  CUKIT_DEVICE void take_student(const SoftmaxRows& rows) { student_ = rows; }

  // Sums over the quads of lanes and stores the rows; `first`, `rows_left` as in the constructor.
  CUKIT_DEVICE void finish(const KlRowArrays& arrays, long long first, int rows_left) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum_t = quad_sum(teacher_.sum[half]), sum_s = quad_sum(student_.sum[half]);
      const float cross_t = quad_sum(cross_t_[half]), cross_s = quad_sum(cross_s_[half]);
      const float lse_t = end<KNOWN_T>(teacher_.max[half], sum_t, scale_t_);
      const float lse_s = end<KNOWN_S == 1>(student_.max[half], sum_s, scale_s_);
      float kl;
      if constexpr (PRECISE) {
        kl = cross_t;
      } else {
        const float cross = cross_t * scale_t_ - cross_s * scale_s_;
        const float value = KNOWN_T ? cross - sum_t * (lse_t - lse_s) + (1.0f - sum_t) * kLog2E
                                    : cross / sum_t - (lse_t - lse_s);
        kl = value * kLn2;
      }
      // 0 for a row without visible keys, and for a negative rounding error near 0. NaN is kept.
      const bool dead = KNOWN_T ? lse_t == infinity() : sum_t == 0.0f;
      if (dead || kl < 0.0f) kl = 0.0f;
      if (threadIdx.x % 4 != 0 || 8 * half >= rows_left) continue;
      const long long row = first + 8 * half;
      if (arrays.kl != nullptr) arrays.kl[row] = kl;
      if (!KNOWN_T && arrays.lse_t != nullptr) {
        arrays.lse_t[row] = dead ? -infinity() : lse_t * kLn2;
      }
      if (!KNOWN_S && arrays.lse_s != nullptr) {
        arrays.lse_s[row] = sum_s == 0.0f ? -infinity() : lse_s * kLn2;
      }
    }
  }

 private:
  // Known: the given lse in log2 units, +infinity for a row without visible keys. Otherwise the
  // initial maximum.
  template <bool Known>
  CUKIT_DEVICE static float start(const float* lse, bool exists) {
    if constexpr (!Known) return kNoScore;
    const float known = exists ? *lse : -infinity();
    return known == -infinity() ? infinity() : known * kLog2E;
  }

  template <bool Known>
  CUKIT_DEVICE static float end(float max, float sum, float scale) {
    return Known ? max : fmaf(max, scale, log2f(sum));
  }

  // p (expm1(-d) + d), given x = log2 p and u = log2 q.
  CUKIT_DEVICE static float precise_term(float x, float u) {
    const float p = exp2f(x), q = exp2f(u), d = (x - u) * kLn2;
    const float series =
        d * d *
        fmaf(d, fmaf(d, fmaf(d, fmaf(d, 1.0f / 720, -1.0f / 120), 1.0f / 24), -1.0f / 6), 0.5f);
    return fabsf(d) < 0.25f ? p * series : fmaf(p, d, q - p);
  }

  CUKIT_DEVICE static float quad_sum(float value) {
    value += __shfl_xor_sync(kFullMask, value, 1);
    return value + __shfl_xor_sync(kFullMask, value, 2);
  }

  SoftmaxRows teacher_, student_;  // max: the lse in log2 units if it is given
  float cross_t_[2], cross_s_[2];
  float scale_t_, scale_s_;
};

}  // namespace cukit
