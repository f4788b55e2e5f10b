// The elementwise computations in the sweeps over a row of logits, for every divergence.
//
//   p = softmax(teacher / T),  q = softmax(student / T),  d = log p - log q
//
// forward_kl           sum_v p (expm1(-d) + d)                       gradient q - p
// the others           sum_v term_v,  gradient q_v (slope_v - sum_w q_w slope_w):
//   reverse_kl           q (expm1(d) - d)                            slope -d
//   jsd                  beta p log(p / m) + (1 - beta) q log(q / m), m = beta p + (1 - beta) q
//                                                                    slope (1 - beta) log(q / m)
//   skewed_forward_kl    p log(p / m) - p + m, m = beta p + (1 - beta) q
//                                                                    slope -(1 - beta) p / m
//   skewed_reverse_kl    q log(q / m) - q + m, m = (1 - beta) p + beta q
//                                                                    slope log(q / m) - beta q / m
//   total_variation      |p - q| / 2                                 slope sign(q - p) / 2
//
// Rows far apart, with a large divergence, are summed by these formulas, in r = q / p and, for the
// mixtures, log(m / p). For close rows the terms are rewritten so that none is negative or the
// difference of two larger terms: near d = 0 as power series in x = r - 1. Threads with columns
// that a model masks, where r overflows or underflows, divide by the larger of p and q. A constant
// added to a slope cancels in the gradient, so slopes that vanish with d are used.
//
// Macros: DTYPE; DIVERGENCE 0..5, in the order above; HARD 0|1; TRANSFORM 0|1.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/logits.cuh"

namespace cukit {

enum class Divergence { ForwardKl, ReverseKl, Jsd, SkewedForwardKl, SkewedReverseKl, TotalVariation };
constexpr Divergence kDivergence = static_cast<Divergence>(DIVERGENCE);

// The first sweep gives the forward KL as a difference of terms. This difference is the loss if it
// exceeds the fraction kMinShare of 1 + the sum of the terms' magnitudes: its rounding error, about
// 1e-7 of that sum, is then below 1e-5 of the loss.
constexpr float kMinShare = 1.0f / 16;

// How a sweep computes an element, see ForwardKlRow and CentredRow. Apart: student and teacher
// differ enough for the formulas above. Close: they do not. Near: a vector of a close row in which
// all |b| = |d / log 2| are small. Masked: as Close or Apart, but probabilities may be 0.
enum class Sweep { Apart, Close, Near, Masked };
template <Sweep sweep>
struct Choice { static constexpr Sweep kSweep = sweep; };

// (expm1(-d) + d) / b^2 for d = b log 2 and |b| < kNear: a Chebyshev fit, relative error 1.4e-7.
constexpr float kNear = 0.5f;

CUKIT_DEVICE float remainder_series(float b) {
  float value = fmaf(b, 1.54541539e-04f, -1.33822567e-03f);
  value = fmaf(value, b, 9.61808038e-03f);
  value = fmaf(value, b, -5.55037977e-02f);
  return fmaf(value, b, 2.40226507e-01f);
}

// For |w| and |x| below this, the next two functions are Taylor series, relative error 1e-7.
constexpr float kSeriesRadius = 0.125f;

// (w - log(1 + w)) / w^2
CUKIT_DEVICE float log_series(float w) {
  float value = fmaf(w, 1.0f / 8, -1.0f / 7);
  value = fmaf(value, w, 1.0f / 6);
  value = fmaf(value, w, -1.0f / 5);
  value = fmaf(value, w, 1.0f / 4);
  value = fmaf(value, w, -1.0f / 3);
  return fmaf(value, w, 1.0f / 2);
}

// ((1 + x) log(1 + x) - x) / x^2
CUKIT_DEVICE float entropy_series(float x) {
  float value = fmaf(x, 1.0f / 56, -1.0f / 42);
  value = fmaf(value, x, 1.0f / 30);
  value = fmaf(value, x, -1.0f / 20);
  value = fmaf(value, x, 1.0f / 12);
  value = fmaf(value, x, -1.0f / 6);
  return fmaf(value, x, 1.0f / 2);
}

// log(1 + w), relative error 2e-7: for -1/2 <= w <= 1 a Chebyshev fit of 2 atanh(w / (2 + w)).
CUKIT_DEVICE float log_of_one_plus(float w) {
  const float ratio = __fdividef(w, 2.0f + w);
  const float square = ratio * ratio;
  float value = fmaf(square, 2.44169205e-01f, 2.13923872e-01f);
  value = fmaf(value, square, 2.86207855e-01f);
  value = fmaf(value, square, 3.99986893e-01f);
  value = fmaf(value, square, 6.66666806e-01f);
  value = ratio * fmaf(value, square, 2.0f);
  return w >= -0.5f && w <= 1.0f ? value : kLn2 * __log2f(1.0f + w);
}

// w - log(1 + w), given log(1 + w).
CUKIT_DEVICE float log_excess(float w, float log1p_w) {
  return fabsf(w) < kSeriesRadius ? w * w * log_series(w) : w - log1p_w;
}

// (1 + x) log(1 + x) - x, given (1 + x) log(1 + x).
CUKIT_DEVICE float entropy_excess(float x, float product) {
  return fabsf(x) < kSeriesRadius ? x * x * entropy_series(x) : product - x;
}

// The statistics of a row from the first sweep, for the later ones.
struct RowMasses {
  Logits student_logits, teacher_logits;
  float scale;  // log2(e) / T
  Mass student;
  Mass teacher;
  float offset;      // log2 teacher mass - log2 student mass
  float mass_ratio;  // teacher mass / student mass
  float soft_scale;  // factor from `difference` to the gradient
  Mass plain;        // of the student without temperature
  float hard_scale;
  float hard_scale_of_mass;

  // d / log 2 of an element.
  CUKIT_DEVICE float distance(float student_z, float teacher_z) const {
    return fmaf(teacher_z - student_z, scale, -offset);
  }

  // The forward KL, sum_v p d, from the first sweep.
  CUKIT_DEVICE float divergence() const {
    return kLn2 * fmaf(teacher.moment / teacher.sum, scale, -offset);
  }

  // The reverse KL, sum_v q (-d), likewise.
  CUKIT_DEVICE float reverse_divergence() const {
    return kLn2 * fmaf(student.moment / student.sum, scale, offset);
  }

  // Whether all ratios of this thread's probabilities are finite and normal floats, given the
  // thread's lowest logits. False if the thread has masked columns.
  CUKIT_DEVICE bool ratios_fit(float lowest_student, float lowest_teacher) const {
    return teacher.exponent(lowest_teacher, scale) > log2f(teacher.sum) - kLargest &&
           student.exponent(lowest_student, scale) > log2f(student.sum) - kLargest;
  }
  static constexpr float kLargest = 120.0f;

  // Whether a loss of `share` times the forward KL is accurate. False for NaN, which the moment is
  // if both rows mask a column.
  CUKIT_DEVICE bool far_apart(float share = 1.0f) const {
    return is_large(teacher, divergence() * share);
  }

  // The same for the reverse KL.
  CUKIT_DEVICE bool reversely_far_apart() const { return is_large(student, reverse_divergence()); }

  CUKIT_DEVICE bool is_large(const Mass& mass, float loss) const {
    const float terms = fabsf(mass.moment / mass.sum) * scale + fabsf(offset);
    return loss > (terms + 1.0f) * kMinShare;
  }
};

// The forward KL. If the first sweep's sums give the divergence accurately, the second sweep writes
// q - p. If student and teacher are close, the second sweep sums the divergence, and for small |d|
// computes q - p = p (f - d) with the series f = expm1(-d) + d.
struct ForwardKlRow : RowMasses {
  // Whether all exponentials of the teacher's logits from `lowest` up, and all q / p, are normal
  // floats: q is at most 2^kSlack / student mass.
  CUKIT_DEVICE bool ratios_fit(float lowest) const {
    return teacher.exponent(lowest, scale) > fmaxf(log2f(mass_ratio), 0.0f) - 100.0f;
  }

  // (q - p) * teacher mass of an element. Its term of the divergence, times the teacher's mass, is
  // added to `divergence_sum`, except with Sweep::Apart, where the divergence is already known.
  template <Sweep sweep>
  CUKIT_DEVICE float difference(float student_z, float teacher_z, float& divergence_sum) const {
    const float p = teacher.term(teacher_z, scale);
    if constexpr (sweep == Sweep::Apart) return fmaf(student.term(student_z, scale), mass_ratio, -p);
    const float b = distance(student_z, teacher_z);
    const float series = b * b * remainder_series(b);
    const float near = fmaf(b, -kLn2, series);
    if constexpr (sweep == Sweep::Near) {
      divergence_sum = fmaf(p, series, divergence_sum);
      return p * near;
    }
    const bool is_near = fabsf(b) < kNear;
    if constexpr (sweep == Sweep::Close) {
      const float far = exp2f(-b) - 1.0f;  // q / p - 1
      divergence_sum = fmaf(p, is_near ? series : fmaf(b, kLn2, far), divergence_sum);
      return p * (is_near ? near : far);
    } else {
      const float far = fmaf(student.term(student_z, scale), mass_ratio, -p);
      // For p = 0, d is infinite or NaN, but the term p d is 0.
      divergence_sum += is_near ? p * series : p > 0.0f ? fmaf(p * b, kLn2, far) : far;
      return is_near ? p * near : far;
    }
  }
};

// The other divergences: a second sweep sums terms and slopes, a third writes the gradient. If the
// rows are far apart, the reverse KL and the sum of its slopes are known after the first sweep.
struct CentredRow : RowMasses {
  static constexpr bool kMixes = kDivergence == Divergence::Jsd ||
                                 kDivergence == Divergence::SkewedForwardKl ||
                                 kDivergence == Divergence::SkewedReverseKl;
  static constexpr bool kSkewed = kMixes && kDivergence != Divergence::Jsd;

  // If all |b| of a vector are below this, all |x| are below kSeriesRadius, with a margin for
  // rounding.
  static constexpr float kNearby = 0.16f;

  float beta;
  float centre;  // sum_v q_v slope_v
  bool far;

  // Approximately the smallest ratio of the divergence to the forward KL, times the gain in
  // accuracy of its definition over that of the forward KL: no term is a difference of terms of
  // size p d.
  CUKIT_DEVICE float share_of_kl() const {
    if constexpr (kDivergence == Divergence::Jsd) return 2.0f * beta * (1.0f - beta);
    if constexpr (kSkewed) return 2.0f * (1.0f - beta) * (1.0f - beta);
    return 1.0f;
  }

  // One element.
  struct Pair {
    float p, q;
    float b;         // d / log 2
    float r;         // q / p
    float of_p;      // log2(m / p)
    float of_q;      // log2(m / q)
    float fraction;  // 1 - p / m or 1 - q / m, for the skewed divergences
  };

  CUKIT_DEVICE float share_of_q() const {  // weight of q in m
    return kDivergence == Divergence::SkewedReverseKl ? beta : 1.0f - beta;
  }

  // Computes the ratios of an element, which must be normal floats.
  CUKIT_DEVICE void compare(Pair& at) const {
    if constexpr (kMixes) {
      at.r = exp2f(-at.b);
      const float m = fmaf(share_of_q(), at.r, 1.0f - share_of_q());  // m / p
      at.of_p = __log2f(m);
      at.of_q = at.b + at.of_p;
      if constexpr (kSkewed) at.fraction = skewed_fraction(at.r - 1.0f, m);
    }
  }

  CUKIT_DEVICE float skewed_fraction(float x, float m) const {
    const float sign = kDivergence == Divergence::SkewedForwardKl ? 1.0f : -1.0f;
    return sign * (1.0f - beta) * __fdividef(x, m);
  }

  // The same for all values of the ratios.
  CUKIT_DEVICE void compare_safely(Pair& at) const {
    at.b = fmaxf(fminf(at.b, 1e30f), -1e30f);  // replaces NaN, if both are masked
    if constexpr (kMixes) {
      const float e = exp2f(-fabsf(at.b)), share = share_of_q();  // smaller over larger
      const bool likelier = at.b >= 0.0f;                         // p >= q
      const float m = likelier ? fmaf(share, e, 1.0f - share) : fmaf(1.0f - share, e, share);
      const float log_m = __log2f(m);  // m over the larger
      at.of_p = likelier ? log_m : log_m - at.b;
      at.of_q = likelier ? log_m + at.b : log_m;
      if constexpr (kSkewed) at.fraction = skewed_fraction(likelier ? e - 1.0f : 1.0f - e, m);
    }
  }

  // Slopes have an absolute error of about 1e-7, negligible in the gradient, which is q times a
  // slope.
  CUKIT_DEVICE float slope(const Pair& at) const {
    if constexpr (kDivergence == Divergence::ReverseKl) {
      return -kLn2 * at.b;
    } else if constexpr (kDivergence == Divergence::Jsd) {
      return -kLn2 * (1.0f - beta) * at.of_q;
    } else if constexpr (kDivergence == Divergence::SkewedForwardKl) {
      return (1.0f - beta) * at.fraction;
    } else if constexpr (kDivergence == Divergence::SkewedReverseKl) {
      return fmaf(beta, at.fraction, -kLn2 * at.of_q);
    } else {
      return at.b == 0.0f ? 0.0f : copysignf(0.5f, -at.b);  // b is the same in all sweeps
    }
  }

  // The term of an element if the rows are far apart, see loss_of().
  CUKIT_DEVICE float defined_term(const Pair& at) const {
    if constexpr (kDivergence == Divergence::ReverseKl) return -kLn2 * at.q * at.b;
    if constexpr (kDivergence == Divergence::TotalVariation) return 0.5f * fabsf(at.p - at.q);
    if constexpr (kDivergence == Divergence::SkewedReverseKl) return at.q * at.of_q;
    return at.p * at.of_p;
  }

  // The loss, given the sum of terms over the row.
  CUKIT_DEVICE float loss_of(float sum) const {
    if (!far || !kMixes) return sum;
    return kDivergence == Divergence::Jsd ? fmaf(-kLn2 * beta, sum, centre) : -kLn2 * sum;
  }

  // The term of an element with |b| < kNearby.
  CUKIT_DEVICE float near_term(const Pair& at, float x) const {
    if constexpr (kDivergence == Divergence::ReverseKl) {
      return at.q * (at.b * at.b * remainder_series(-at.b));
    } else if constexpr (kDivergence == Divergence::Jsd) {
      const float share = 1.0f - beta;
      const float series = fmaf(-share, entropy_series(share * x), entropy_series(x));
      return at.p * (share * x * x * series);
    } else if constexpr (kDivergence == Divergence::SkewedForwardKl) {
      const float w = (1.0f - beta) * x;  // m / p - 1
      return at.p * (w * w * log_series(w));
    } else if constexpr (kDivergence == Divergence::SkewedReverseKl) {
      const float w = (1.0f - beta) * change(-at.b);  // m / q - 1
      return at.q * (w * w * log_series(w));
    } else {
      return 0.5f * at.p * fabsf(x);
    }
  }

  // 2^-b - 1 for |b| < kNear.
  CUKIT_DEVICE static float change(float b) { return fmaf(b, -kLn2, b * b * remainder_series(b)); }

  CUKIT_DEVICE static float any_change(float b) {
    return fabsf(b) < kNear ? change(b) : exp2f(-b) - 1.0f;
  }

  // The term of an element whose ratios are normal floats. Its error is about 1e-7 of |p d|, which
  // is accurate enough for a vector with some |b| > kNearby.
  CUKIT_DEVICE float fitting_term(const Pair& at) const {
    const float share = 1.0f - beta;
    if constexpr (kDivergence == Divergence::ReverseKl) {
      const float far_term = fmaf(at.q, -kLn2 * at.b, at.p - at.q);
      return fabsf(at.b) < kNear ? near_term(at, 0.0f) : far_term;
    } else if constexpr (kDivergence == Divergence::Jsd) {
      const float x = any_change(at.b), w = share * x;
      const float own = share * (1.0f + x) * (-kLn2 * at.b);
      return at.p * fmaxf(fmaf(-(1.0f + w), log_of_one_plus(w), own), 0.0f);
    } else if constexpr (kDivergence == Divergence::SkewedForwardKl) {
      const float w = share * any_change(at.b);
      return at.p * fmaxf(w - log_of_one_plus(w), 0.0f);
    } else if constexpr (kDivergence == Divergence::SkewedReverseKl) {
      const float w = share * any_change(-at.b);
      return at.q * fmaxf(w - log_of_one_plus(w), 0.0f);
    } else {
      return 0.5f * at.p * fabsf(any_change(at.b));
    }
  }

  // The term of any element. Here x = min(p, q) / max(p, q) - 1.
  CUKIT_DEVICE float exact_term(const Pair& at) const {
    const float p = at.p, q = at.q;
    if (fmaxf(p, q) == 0.0f) return 0.0f;  // masked in both: b is NaN
    if constexpr (kDivergence == Divergence::ReverseKl) {
      const float far_term = fmaf(q, -kLn2 * at.b, p - q);
      const float term = fabsf(at.b) < kNear ? near_term(at, 0.0f) : far_term;
      return q > 0.0f ? term : p;
    }
    const float gap = kLn2 * fabsf(at.b);
    const bool likelier = at.b >= 0.0f;  // p >= q
    const float x = expm1f(-gap);
    if constexpr (kDivergence == Divergence::Jsd) {
      const float share = likelier ? 1.0f - beta : beta;  // weight of the smaller one in m
      const float log_m = log1pf(share * x);              // log(m / larger)
      const float own = x > -1.0f ? -(1.0f + x) * gap : 0.0f;
      const float of_m = entropy_excess(share * x, (1.0f + share * x) * log_m);
      return (likelier ? p : q) * (share * entropy_excess(x, own) - of_m);
    } else if constexpr (kDivergence == Divergence::SkewedForwardKl) {
      return skewed_term(p, q, likelier, gap, x);
    } else if constexpr (kDivergence == Divergence::SkewedReverseKl) {
      return skewed_term(q, p, !likelier, gap, x);
    } else {
      return -0.5f * (likelier ? p : q) * x;
    }
  }

  // a log(a / m) - a + m with m = beta a + (1 - beta) b. `likelier`: a >= b. `gap`, `x`: as in
  // exact_term.
  CUKIT_DEVICE float skewed_term(float a, float b, bool likelier, float gap, float x) const {
    const float share = 1.0f - beta;
    const float log_m = log1pf((likelier ? share : beta) * x);  // log(m / larger)
    const float w = share * (likelier ? x : -x / (1.0f + x));   // m / a - 1
    if (likelier || w < kSeriesRadius) return a * log_excess(w, log_m);
    return b * (x > -1.0f ? (1.0f + x) * (-gap - log_m) - share * x : share);
  }

  // p times the teacher's mass, as in the sums.
  CUKIT_DEVICE float p_of(float teacher_z) const { return teacher.term(teacher_z, scale); }

  CUKIT_DEVICE float q_of(float student_z) const {
    return student.term(student_z, scale) * mass_ratio;
  }

  // Adds N elements: terms to the sum, q times slopes to the moment.
  template <Sweep sweep, int N>
  CUKIT_DEVICE void add_all(Mass& sums, const float (&z)[N], const float (&teacher_z)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Pair at;
      at.b = distance(z[j], teacher_z[j]);
      float term;
      if constexpr (sweep == Sweep::Masked) {
        at.p = p_of(teacher_z[j]);
        at.q = q_of(z[j]);
        const float b = at.b;
        compare_safely(at);
        Pair given = at;
        given.b = b;
        term = far ? defined_term(at) : exact_term(given);
        sums.moment += at.q > 0.0f ? at.q * slope(kDivergence == Divergence::ReverseKl ? given : at)
                                   : 0.0f;
      } else {
        compare(at);
        at.p = p_of(teacher_z[j]);
        at.q = kMixes ? at.p * at.r : q_of(z[j]);
        term = sweep == Sweep::Apart  ? defined_term(at)
               : sweep == Sweep::Near ? near_term(at, change(at.b))
                                      : fitting_term(at);
        sums.moment = fmaf(at.q, slope(at), sums.moment);
      }
      sums.sum += term;
    }
  }

  template <Sweep sweep, int N>
  CUKIT_DEVICE void add(Mass& sums, const Vec<element_t, N>& of_student,
                        const Vec<element_t, N>& of_teacher) const {
    float z[N], teacher_z[N];
    student_logits.load(z, of_student);
    teacher_logits.load(teacher_z, of_teacher);
    if constexpr (sweep != Sweep::Close) {
      add_all<sweep>(sums, z, teacher_z);
    } else {
      bool nearby = true;  // false for NaN
#pragma unroll
      for (int j = 0; j < N; ++j) nearby &= fabsf(distance(z[j], teacher_z[j])) < kNearby;
      nearby ? add_all<Sweep::Near>(sums, z, teacher_z) : add_all<Sweep::Close>(sums, z, teacher_z);
    }
  }

  // An element of the gradient, divided by soft_scale; does not use the last argument.
  template <Sweep sweep>
  CUKIT_DEVICE float difference(float student_z, float teacher_z, float&) const {
    Pair at;
    at.b = distance(student_z, teacher_z);
    at.q = student.term(student_z, scale);
    if constexpr (sweep == Sweep::Masked) {
      const float b = at.b;
      compare_safely(at);
      if (kDivergence == Divergence::ReverseKl) at.b = b;
      return at.q > 0.0f ? at.q * (slope(at) - centre) : 0.0f;
    } else {
      compare(at);
      return at.q * (slope(at) - centre);
    }
  }
};

#if DIVERGENCE == 0
using DivergenceRow = ForwardKlRow;
#else
using DivergenceRow = CentredRow;
#endif

template <Sweep sweep, typename Row, int N>
CUKIT_DEVICE void differences(const Row& row, float (&into)[N], const float (&of_student)[N],
                              const float (&of_teacher)[N], float& divergence_sum) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    into[j] = row.template difference<sweep>(of_student[j], of_teacher[j], divergence_sum);
  }
}

// The gradient of N elements with respect to the inputs of their logits. `hard_target` is
// subtracted from the gradient of the logits; it is 0 except for the target's element.
template <Sweep sweep, typename Row, int N>
CUKIT_DEVICE void gradient_of(const Row& row, Vec<element_t, N>& into,
                              const Vec<element_t, N>& of_student,
                              const Vec<element_t, N>& of_teacher, float& divergence_sum,
                              float hard_target = 0.0f) {
  float z[N], teacher_z[N], g[N];
  row.student_logits.load(z, of_student);
  row.teacher_logits.load(teacher_z, of_teacher);
  if constexpr (sweep == Sweep::Close) {
    float widest = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) widest = fmaxf(widest, fabsf(row.distance(z[j], teacher_z[j])));
    widest < kNear ? differences<Sweep::Near>(row, g, z, teacher_z, divergence_sum)
                   : differences<Sweep::Close>(row, g, z, teacher_z, divergence_sum);
  } else {
    differences<sweep>(row, g, z, teacher_z, divergence_sum);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    g[j] *= row.soft_scale;
    if constexpr (HARD) {
      g[j] = fmaf(row.plain.term(z[j], kLog2E), row.hard_scale_of_mass, g[j]) - hard_target;
    }
  }
  row.student_logits.chain(g, z);
  from_floats(into, g);
}

}  // namespace cukit
