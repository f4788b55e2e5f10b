// KL divergence of each row between the teacher's and the student's softmax, with the gradient for
// the student's logits; optionally the cross-entropy on a target mixed into both.
//
//   p = softmax(teacher / T),  q = softmax(student / T),  d = log p - log q
//   soft = sum_v p (expm1(-d) + d) * factors.soft_loss
//   hard = log sum_v exp z_v - z_target, z = student                                 (HARD)
//   grad = ((q - p) * factors.soft_gradient + (softmax(z) - onehot(target)) * factors.hard_gradient)
//          * grad_loss / normalizer
//
// First sweep: both rows' masses, and the teacher's mass weighted with teacher - student, which gives
// the divergence as sum_v p d. Where that is large next to what it is the difference of, it is the
// loss, and the second sweep writes q - p. Where it is not, student and teacher are close and both
// would be rounding errors: the second sweep computes the soft sum above. Every term of it is >= 0:
// nothing cancels. For small |d| the bracket is a polynomial f, and q - p = p (f - d).
//
// Mapping: a cluster of CLUSTER blocks a row, each with its part of the columns. The gradient may
//   overwrite the student's logits.
// Shared memory: 2 * CACHED * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements an access (the tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED vectors of each row that a thread keeps; GRAD 0|1; HARD 0|1.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/parameters.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

constexpr int kStudent = 0;
constexpr int kTeacher = 1;
constexpr int kPlain = 2;  // the student without temperature
using Exchange = cukit::RowExchange<HARD ? 3 : 2>;
using Single = cukit::Vec<T, 1>;

// The first sweep's divergence is the loss where it is at least this share of what it is the
// difference of, and of 1: its rounding errors, about 1e-7 of those, are then below 1e-5 of it.
constexpr float kLeastShare = 1.0f / 16;

// How the second sweep computes q - p, see Row. Near: a vector of a close row in which all |b| < kNear.
enum class Sweep { Apart, Close, Near, Masked };
template <Sweep sweep>
struct Choice { static constexpr Sweep kSweep = sweep; };

constexpr int kInFlight = 2;  // accesses to each tensor that a thread issues before it uses the first
constexpr int kAhead = 4;     // batches of those on their way to shared memory

// (expm1(-d) + d) / b^2 for d = b log 2 and |b| < kNear, to 1.4e-7 of it: a Chebyshev fit.
constexpr float kNear = 0.5f;

CUKIT_DEVICE float remainder_series(float b) {
  float value = fmaf(b, 1.54541539e-04f, -1.33822567e-03f);
  value = fmaf(value, b, 9.61808038e-03f);
  value = fmaf(value, b, -5.55037977e-02f);
  return fmaf(value, b, 2.40226507e-01f);
}

// What the second sweep needs to know of a row.
struct Row {
  float scale;  // log2(e) / T
  cukit::Mass student;
  cukit::Mass teacher;
  float offset;      // log2 teacher mass - log2 student mass
  float mass_ratio;  // teacher mass / student mass
  float soft_scale;  // of (q - p) * teacher mass
  cukit::Mass plain;
  float hard_scale;
  float hard_scale_of_mass;

  // sum_v p d, from the first sweep.
  CUKIT_DEVICE float divergence() const {
    return cukit::kLn2 * fmaf(teacher.moment / teacher.sum, scale, -offset);
  }

  // Whether that is accurate. False for NaN, which columns that both rows mask make of the moment.
  CUKIT_DEVICE bool far_apart() const {
    const float terms = fabsf(teacher.moment / teacher.sum) * scale + fabsf(offset);
    return divergence() > (terms + 1.0f) * kLeastShare;
  }

  // Whether no exponential of the teacher's logits from `lowest` on, and no q / p, leaves the range
  // of floats: q is at most 2^kSlack / student mass.
  CUKIT_DEVICE bool ratios_fit(float lowest) const {
    return teacher.exponent(lowest, scale) > fmaxf(log2f(mass_ratio), 0.0f) - 100.0f;
  }

  // d / log 2 of an element.
  CUKIT_DEVICE float distance(float student_z, float teacher_z) const {
    return fmaf(teacher_z - student_z, scale, -offset);
  }

  // (q - p) * teacher mass of an element. Its share of the divergence, times the teacher's mass, is
  // added to `share`, except with Sweep::Apart: a sweep for rows whose divergence is known.
  template <Sweep sweep>
  CUKIT_DEVICE float difference(float student_z, float teacher_z, float& share) const {
    const float p = teacher.term(teacher_z, scale);
    if constexpr (sweep == Sweep::Apart) return fmaf(student.term(student_z, scale), mass_ratio, -p);
    const float b = distance(student_z, teacher_z);
    const float series = b * b * remainder_series(b);
    const float near = fmaf(b, -cukit::kLn2, series);
    if constexpr (sweep == Sweep::Near) {
      share = fmaf(p, series, share);
      return p * near;
    }
    const bool is_near = fabsf(b) < kNear;
    if constexpr (sweep == Sweep::Close) {
      const float far = exp2f(-b) - 1.0f;  // q / p - 1
      share = fmaf(p, is_near ? series : fmaf(b, cukit::kLn2, far), share);
      return p * (is_near ? near : far);
    } else {
      const float far = fmaf(student.term(student_z, scale), mass_ratio, -p);
      // p = 0 makes d infinite or NaN; p d is 0 all the same.
      share += is_near ? p * series : p > 0.0f ? fmaf(p * b, cukit::kLn2, far) : far;
      return is_near ? p * near : far;
    }
  }

  template <Sweep sweep, int N>
  CUKIT_DEVICE void differences(float (&into)[N], const float (&of_student)[N],
                                const float (&of_teacher)[N], float& share) const {
#pragma unroll
    for (int j = 0; j < N; ++j) into[j] = difference<sweep>(of_student[j], of_teacher[j], share);
  }

  // The gradient of N elements but for `hard_target`, which the target's is less.
  template <Sweep sweep, int N>
  CUKIT_DEVICE void gradient(cukit::Vec<T, N>& into, const cukit::Vec<T, N>& of_student,
                             const cukit::Vec<T, N>& of_teacher, float& share,
                             float hard_target = 0.0f) const {
    float z[N], teacher_z[N], g[N];
    cukit::to_floats(z, of_student);
    cukit::to_floats(teacher_z, of_teacher);
    if constexpr (sweep == Sweep::Close) {
      float widest = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) widest = fmaxf(widest, fabsf(distance(z[j], teacher_z[j])));
      widest < kNear ? differences<Sweep::Near>(g, z, teacher_z, share)
                     : differences<Sweep::Close>(g, z, teacher_z, share);
    } else {
      differences<sweep>(g, z, teacher_z, share);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      g[j] *= soft_scale;
      if constexpr (HARD) {
        g[j] = fmaf(plain.term(z[j], cukit::kLog2E), hard_scale_of_mass, g[j]) - hard_target;
      }
    }
    cukit::from_floats(into, g);
  }
};

// The first sweep's share of one thread.
struct Statistics {
  cukit::Mass student, teacher, plain;
  float lowest_teacher = cukit::infinity();
  float scale;

  template <int N, int Batch>
  CUKIT_DEVICE void cover(const cukit::Vec<T, N> (&of_student)[Batch],
                          const cukit::Vec<T, N> (&of_teacher)[Batch]) {
    const float top = cukit::extreme<cukit::Largest>(of_student);
    student.cover(top, scale);
    if constexpr (HARD) plain.cover(top, cukit::kLog2E);
    teacher.cover(cukit::extreme<cukit::Largest>(of_teacher), scale);
    lowest_teacher = fminf(lowest_teacher, cukit::extreme<cukit::Smallest>(of_teacher));
  }

  // Elements that are covered.
  template <int N>
  CUKIT_DEVICE void add(const cukit::Vec<T, N>& of_student, const cukit::Vec<T, N>& of_teacher) {
    float z[N], teacher_z[N];
    cukit::to_floats(z, of_student);
    cukit::to_floats(teacher_z, of_teacher);
    float student_sum = 0.0f, plain_sum = 0.0f, teacher_sum = 0.0f, moment = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      student_sum += student.term(z[j], scale);
      if constexpr (HARD) plain_sum += plain.term(z[j], cukit::kLog2E);
      const float p = teacher.term(teacher_z[j], scale);
      teacher_sum += p;
      moment = fmaf(p, teacher_z[j] - z[j], moment);
    }
    student.sum += student_sum;
    plain.sum += plain_sum;
    teacher.sum += teacher_sum;
    teacher.moment += moment;
  }
};

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS) kl_divergence(
    const T* student,                         // [rows, columns], row_stride elements a row
    const T* __restrict__ teacher,            // likewise
    const cukit::id_t* __restrict__ targets,  // [rows]; null: no row is ignored (not with HARD)
    float* __restrict__ soft_rows,            // [rows]
    float* __restrict__ hard_rows,            // [rows]; HARD only
    T* grad,                                  // as `student`, or the same; GRAD only
    const float* __restrict__ grad_loss,      // [rows] (stride 1) or scalar (stride 0), or null
    const float* __restrict__ normalizer,     // scalar or null
    const cukit::LogitRows rows, const cukit::DivergenceFactors factors) {
  __shared__ Exchange::Shared shared;
  CUKIT_DYNAMIC_SHARED(Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const cukit::RowSlice slice(row, rows.row_stride, rows.columns, rank);
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets != nullptr ? targets[row] : 0;
  if (targets != nullptr && target == rows.ignore_index) {
    if (writes_loss) soft_rows[row] = 0.0f;
    if (HARD && writes_loss) hard_rows[row] = 0.0f;
    if constexpr (GRAD) slice.clear(grad);
    return;
  }
  const bool in_range = target >= 0 && target < rows.columns;
  Single target_student, target_teacher;
  if (HARD && in_range) {
    // Before the barriers of the exchange: after them the gradient may overwrite the student's.
    target_student[0] = student[slice.base + target];
    target_teacher[0] = teacher[slice.base + target];
  }

  Exchange exchange(shared, rank);
  Statistics statistics;
  statistics.scale = cukit::kLog2E * factors.inverse_temperature;
  const bool has_loose = slice.loose_column >= 0;
  Single loose_student[1], loose_teacher[1];
  if (has_loose) {
    loose_student[0][0] = student[slice.base + slice.loose_column];
    loose_teacher[0][0] = teacher[slice.base + slice.loose_column];
  }
  // Thread t keeps its k-th vectors at (2 k + tensor) * THREADS + t.
  Vector* const mine = cache + threadIdx.x;
  const auto slot = [&](int k, int tensor) { return mine + (2 * k + tensor) * THREADS; };
  const auto add = [&](const cukit::Batch& batch, auto& of_student, auto& of_teacher) {
#pragma unroll
    for (int i = 1; i < kInFlight; ++i) {
      if (batch.has(i)) continue;
      of_student[i] = of_student[0];
      of_teacher[i] = of_teacher[0];
    }
    statistics.cover(of_student, of_teacher);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (batch.has(i)) statistics.add(of_student[i], of_teacher[i]);
    }
  };
  const auto copy = [&](int k) {
    slice.copy(slot(k, kStudent), student, k);
    slice.copy(slot(k, kTeacher), teacher, k);
  };
  const int kept = min(slice.count, CACHED);
  cukit::copied_forwards<kInFlight, kAhead>(kept, copy, [&](const cukit::Batch& batch) {
    Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!batch.has(i)) continue;
      of_student[i] = *slot(batch.first + i, kStudent);
      of_teacher[i] = *slot(batch.first + i, kTeacher);
    }
    add(batch, of_student, of_teacher);
  });
  cukit::forwards<kInFlight>(kept, slice.count, [&](const cukit::Batch& batch) {
    Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!batch.has(i)) continue;
      slice.read(of_student[i], student, batch.first + i);
      slice.read(of_teacher[i], teacher, batch.first + i);
    }
    add(batch, of_student, of_teacher);
  });
  if (has_loose) {
    statistics.cover(loose_student, loose_teacher);
    statistics.add(loose_student[0], loose_teacher[0]);
  }
  cukit::Mass masses[HARD ? 3 : 2];
  masses[kStudent] = statistics.student;
  masses[kTeacher] = statistics.teacher;
  if constexpr (HARD) masses[kPlain] = statistics.plain;
  exchange.merge(masses);

  Row soft;
  soft.scale = statistics.scale;
  soft.student = masses[kStudent];
  soft.teacher = masses[kTeacher];
  const bool active = soft.student.sum != 0.0f && soft.teacher.sum != 0.0f;
  soft.offset = 0.0f;
  soft.mass_ratio = 1.0f;
  if (active) {
    soft.mass_ratio = soft.teacher.sum / soft.student.sum;
    soft.offset = (soft.teacher.reference - soft.student.reference) + log2f(soft.mass_ratio);
  }
  const float upstream =
      GRAD ? cukit::upstream_scale(grad_loss, row * rows.grad_loss_stride, normalizer) : 0.0f;
  const float per_mass = active ? 1.0f / soft.teacher.sum : 0.0f;
  soft.soft_scale = factors.soft_gradient * upstream * per_mass;
  soft.hard_scale = 0.0f;
  soft.hard_scale_of_mass = 0.0f;
  if constexpr (HARD) {
    soft.plain = masses[kPlain];
    if (soft.plain.sum != 0.0f) {
      soft.hard_scale = in_range ? factors.hard_gradient * upstream : cukit::not_a_number();
      soft.hard_scale_of_mass = soft.hard_scale / soft.plain.sum;
    }
    if (writes_loss) {
      const float logit = in_range ? cukit::to_float(target_student[0]) : 0.0f;
      const float loss = cukit::kLn2 * cukit::log2_mass_over(soft.plain, logit, cukit::kLog2E);
      hard_rows[row] = soft.plain.sum == 0.0f ? 0.0f : in_range ? loss : cukit::not_a_number();
    }
  }

  const auto second_sweep = [&](auto choice) {
    constexpr Sweep kSweep = decltype(choice)::kSweep;
    float divergence = 0.0f;
    cukit::backwards<kInFlight>(slice.count, [&](const cukit::Batch& batch) {
      Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) continue;
        if (k < kept) {
          of_student[i] = *slot(k, kStudent);
          of_teacher[i] = *slot(k, kTeacher);
        } else {
          slice.read_again(of_student[i], student, k);
          slice.read_again(of_teacher[i], teacher, k);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) continue;
        Vector gradient;
        float part = 0.0f;
        soft.template gradient<kSweep>(gradient, of_student[i], of_teacher[i], part);
        divergence += part;
        if constexpr (GRAD) slice.write(grad, k, gradient);
      }
    });
    if (has_loose) {
      Single gradient;
      soft.template gradient<kSweep>(gradient, loose_student[0], loose_teacher[0], divergence);
      if constexpr (GRAD) grad[slice.base + slice.loose_column] = gradient[0];
    }
    // By the thread that has just written there.
    if (GRAD && HARD && in_range && slice.owns(static_cast<int>(target))) {
      Single gradient;
      float counted = 0.0f;
      soft.template gradient<kSweep>(gradient, target_student, target_teacher, counted, soft.hard_scale);
      grad[slice.base + target] = gradient[0];
    }
    return divergence;
  };
  if (active && soft.far_apart()) {
    if constexpr (GRAD) second_sweep(Choice<Sweep::Apart>{});
    if (writes_loss) soft_rows[row] = soft.divergence() * factors.soft_loss;
    return;
  }
  // Each thread for itself: masked columns lie side by side.
  const float divergence = exchange.sum(soft.ratios_fit(statistics.lowest_teacher)
                                            ? second_sweep(Choice<Sweep::Close>{})
                                            : second_sweep(Choice<Sweep::Masked>{}));
  if (writes_loss) soft_rows[row] = active ? divergence * per_mass * factors.soft_loss : 0.0f;
}
