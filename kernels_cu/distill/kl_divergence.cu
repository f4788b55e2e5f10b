// KL divergence of each row between the teacher's and the student's softmax, with the gradient for
// the student's logits; optionally the cross-entropy on a target mixed into both.
//
//   p = softmax(teacher / T),  q = softmax(student / T),  d = log p - log q
//   soft = sum_v p (expm1(-d) + d) * soft_loss_factor
//   hard = log sum_v exp z_v - z_target, z = student                                 (HARD)
//   grad = ((q - p) * soft_factor + (softmax(z) - onehot(target)) * hard_factor)
//          * grad_loss / normalizer
//
// First sweep: both rows' masses, and the teacher's mass weighted with teacher - student, which gives
// the divergence as sum_v p d. Where that is large next to what it is the difference of, it is the
// loss, and the second sweep writes q - p. Where it is not, student and teacher are close and both
// would be rounding errors: the second sweep computes the soft sum above. Every term of it is >= 0:
// nothing cancels. For |d| < 1/2 the bracket is its Taylor series f, and q - p = p (f - d); beyond,
// the term is (q - p) + p d.
//
// Mapping: a cluster of CLUSTER blocks a row, each with its part of the columns. The gradient may
//   overwrite the student's logits.
// Shared memory: 2 * CACHED * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements an access (the tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED vectors of each row that a thread keeps, an even number; GRAD 0|1; HARD 0|1.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/vocabulary_row.cuh"

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

// How far apart student and teacher are, for the choice of the second sweep.
struct FarApart { static constexpr bool kNear = false; };
struct Close { static constexpr bool kNear = true; };

constexpr int kInFlight = 2;  // accesses to each tensor that a thread issues before it uses the first

// (expm1(-d) + d) / d^2 for |d| < 1/2, to float accuracy.
CUKIT_DEVICE float remainder_series(float d) {
  float value = fmaf(d, 1.0f / 40320, -1.0f / 5040);
  value = fmaf(value, d, 1.0f / 720);
  value = fmaf(value, d, -1.0f / 120);
  value = fmaf(value, d, 1.0f / 24);
  value = fmaf(value, d, -1.0f / 6);
  return fmaf(value, d, 1.0f / 2);
}

// What the second sweep needs to know of a row.
struct Row {
  float scale;  // log2(e) / T
  float inverse_temperature;
  cukit::Mass student;
  cukit::Mass teacher;
  float offset;      // log teacher mass - log student mass
  float mass_ratio;  // teacher mass / student mass
  float soft_scale;  // of (q - p) * teacher mass
  cukit::Mass plain;
  float hard_scale;
  float hard_scale_of_mass;

  // sum_v p d, from the first sweep.
  CUKIT_DEVICE float divergence() const {
    return fmaf(teacher.moment / teacher.sum, inverse_temperature, -offset);
  }

  // Whether that is accurate. False for NaN, which columns that both rows mask make of the moment.
  CUKIT_DEVICE bool far_apart() const {
    const float terms = fabsf(teacher.moment / teacher.sum) * inverse_temperature + fabsf(offset);
    return divergence() > (terms + 1.0f) * kLeastShare;
  }

  // (q - p) * teacher mass; with Near also the element's share of the divergence, in that unit.
  template <bool Near>
  CUKIT_DEVICE float difference(float student_z, float teacher_z, float& share) const {
    const float q = student.term(student_z, scale);
    const float p = teacher.term(teacher_z, scale);
    const float far = fmaf(q, mass_ratio, -p);
    if constexpr (!Near) return far;
    const float d = fmaf(teacher_z - student_z, inverse_temperature, -offset);
    const float series = d * d * remainder_series(d);
    // p = 0 makes d infinite or NaN; p d is 0 all the same.
    const float far_term = p > 0.0f ? fmaf(p, d, far) : far;
    const bool near = fabsf(d) < 0.5f;
    share += near ? p * series : far_term;
    return near ? p * (series - d) : far;
  }

  // The gradient of N elements; `target` is the index of the target among them, if it is.
  template <bool Near, int N>
  CUKIT_DEVICE void gradient(cukit::Vec<T, N>& into, const cukit::Vec<T, N>& of_student,
                             const cukit::Vec<T, N>& of_teacher, int target, float& share) const {
    float z[N], teacher_z[N], g[N];
    cukit::to_floats(z, of_student);
    cukit::to_floats(teacher_z, of_teacher);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      g[j] = difference<Near>(z[j], teacher_z[j], share) * soft_scale;
      if constexpr (HARD) {
        g[j] = fmaf(plain.term(z[j], cukit::kLog2E), hard_scale_of_mass, g[j]);
      }
    }
    if (HARD && static_cast<unsigned>(target) < N) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j == target) g[j] -= hard_scale;
      }
    }
    cukit::from_floats(into, g);
  }
};

// The first sweep's share of one thread.
struct Statistics {
  cukit::Mass student, teacher, plain;
  float scale;

  template <int N, int Batch>
  CUKIT_DEVICE void cover(const cukit::Vec<T, N> (&of_student)[Batch],
                          const cukit::Vec<T, N> (&of_teacher)[Batch]) {
    const float top = cukit::largest(of_student);
    student.cover(top, scale);
    if constexpr (HARD) plain.cover(top, cukit::kLog2E);
    teacher.cover(cukit::largest(of_teacher), scale);
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
    long long ignore_index, long long row_stride, int columns, int grad_loss_stride,
    float inverse_temperature, float soft_loss_factor, float soft_factor, float hard_factor) {
  __shared__ Exchange::Shared shared;
  CUKIT_DYNAMIC_SHARED(Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const cukit::RowSlice slice(row, row_stride, columns, rank);
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets != nullptr ? targets[row] : 0;
  if (targets != nullptr && target == ignore_index) {
    if (writes_loss) soft_rows[row] = 0.0f;
    if (HARD && writes_loss) hard_rows[row] = 0.0f;
    if constexpr (GRAD) slice.clear(grad);
    return;
  }
  const bool in_range = target >= 0 && target < columns;
  float target_logit = 0.0f;
  if constexpr (HARD) {
    // Before the barriers of the exchange: after them the gradient may overwrite it.
    if (in_range) target_logit = cukit::to_float(student[slice.base + target]);
  }

  Exchange exchange(shared, rank);
  Statistics statistics;
  statistics.scale = cukit::kLog2E * inverse_temperature;
  const bool has_loose = slice.loose_column >= 0;
  Single loose_student[1], loose_teacher[1];
  if (has_loose) {
    loose_student[0][0] = student[slice.base + slice.loose_column];
    loose_teacher[0][0] = teacher[slice.base + slice.loose_column];
  }
  // Thread t keeps its k-th vectors at (2 k + tensor) * THREADS + t.
  Vector* const mine = cache + threadIdx.x;
  cukit::forwards<kInFlight>(slice.count, [&](const auto& batch) {
    Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (batch.has(i)) {
        slice.read(of_student[i], student, batch.first + i);
        slice.read(of_teacher[i], teacher, batch.first + i);
      } else {
        of_student[i] = of_student[0];
        of_teacher[i] = of_teacher[0];
      }
    }
    statistics.cover(of_student, of_teacher);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = batch.first + i;
      if (!batch.has(i)) break;
      if (k < CACHED) {
        mine[2 * k * THREADS] = of_student[i];
        mine[(2 * k + 1) * THREADS] = of_teacher[i];
      }
      statistics.add(of_student[i], of_teacher[i]);
    }
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
  soft.inverse_temperature = inverse_temperature;
  soft.student = masses[kStudent];
  soft.teacher = masses[kTeacher];
  const bool active = soft.student.sum != 0.0f && soft.teacher.sum != 0.0f;
  soft.offset = 0.0f;
  soft.mass_ratio = 1.0f;
  if (active) {
    soft.mass_ratio = soft.teacher.sum / soft.student.sum;
    soft.offset = cukit::kLn2 * ((soft.teacher.reference - soft.student.reference) +
                                 log2f(soft.mass_ratio));
  }
  const float upstream =
      GRAD ? cukit::upstream_scale(grad_loss, row * grad_loss_stride, normalizer) : 0.0f;
  const float per_mass = active ? 1.0f / soft.teacher.sum : 0.0f;
  soft.soft_scale = soft_factor * upstream * per_mass;
  soft.hard_scale = 0.0f;
  soft.hard_scale_of_mass = 0.0f;
  if constexpr (HARD) {
    soft.plain = masses[kPlain];
    if (soft.plain.sum != 0.0f) {
      soft.hard_scale = in_range ? hard_factor * upstream : cukit::not_a_number();
      soft.hard_scale_of_mass = soft.hard_scale / soft.plain.sum;
    }
    if (writes_loss) {
      const float loss =
          cukit::kLn2 * cukit::log2_mass_over(soft.plain, target_logit, cukit::kLog2E);
      hard_rows[row] = soft.plain.sum == 0.0f ? 0.0f : in_range ? loss : cukit::not_a_number();
    }
  }

  const int target_column = in_range ? static_cast<int>(target) : 0;
  const auto second_sweep = [&](auto nearness) {
    constexpr bool kNear = decltype(nearness)::kNear;
    float divergence = 0.0f;
    cukit::backwards<kInFlight>(slice.count, [&](const auto& batch) {
      Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) break;
        if (k < CACHED) {
          of_student[i] = mine[2 * k * THREADS];
          of_teacher[i] = mine[(2 * k + 1) * THREADS];
        } else {
          slice.read_again(of_student[i], student, k);
          slice.read_again(of_teacher[i], teacher, k);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = batch.first + i;
        if (!batch.has(i)) break;
        Vector gradient;
        const int at = HARD ? target_column - slice.column(k) : 0;
        float part = 0.0f;
        soft.template gradient<kNear>(gradient, of_student[i], of_teacher[i], at, part);
        divergence += part;
        if constexpr (GRAD) slice.write(grad, k, gradient);
      }
    });
    if (has_loose) {
      Single gradient;
      const int at = HARD ? target_column - slice.loose_column : 0;
      soft.template gradient<kNear>(gradient, loose_student[0], loose_teacher[0], at, divergence);
      if constexpr (GRAD) grad[slice.base + slice.loose_column] = gradient[0];
    }
    return divergence;
  };
  if (active && soft.far_apart()) {
    if constexpr (GRAD) second_sweep(FarApart{});
    if (writes_loss) soft_rows[row] = soft.divergence() * soft_loss_factor;
  } else {
    const float divergence = exchange.sum(second_sweep(Close{}));
    if (writes_loss) soft_rows[row] = active ? divergence * per_mass * soft_loss_factor : 0.0f;
  }
}
