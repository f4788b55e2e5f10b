// KL divergence of each row between the teacher's and the student's softmax, with the gradient for
// the student's logits; optionally the cross-entropy on a target mixed into both.
//
//   p = softmax(teacher / T),  q = softmax(student / T),  d = log p - log q
//   soft = sum_v p (expm1(-d) + d) * soft_loss_factor
//   hard = log sum_v exp z_v - z_target, z = student                                 (HARD)
//   grad = ((q - p) * soft_factor + (softmax(z) - onehot(target)) * hard_factor)
//          * grad_loss / normalizer
//
// Every term of the soft sum is >= 0: nothing cancels, however close the two are. For |d| < 1/2 the
// bracket is its Taylor series f, and q - p = p (f - d); beyond, the term is (q - p) + p d.
//
// Mapping: a cluster of CLUSTER blocks a row, each with its part of the columns. First sweep: the
//   rows' masses. Second sweep: loss and (GRAD) gradient, which may overwrite the student's logits.
// Shared memory: with CACHED each thread keeps its vectors of both rows between the sweeps, twice
//   ceil(ceil((columns / VEC + 1) / CLUSTER) / THREADS) * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements an access (the tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED 0|1; GRAD 0|1; HARD 0|1.
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

// What an element of the second sweep needs to know of its row, in units of the teacher's mass.
struct SoftRow {
  float scale;               // log2(e) / T
  float inverse_temperature;
  float student_reference;
  float teacher_reference;
  float offset;              // log teacher mass - log student mass
  float mass_ratio;          // teacher mass / student mass

  // q - p, and the element's share of the divergence added to `divergence`.
  CUKIT_DEVICE float difference(float student, float teacher, float& divergence) const {
    const float q = exp2f(fmaf(student, scale, -student_reference));
    const float p = exp2f(fmaf(teacher, scale, -teacher_reference));
    const float d = fmaf(teacher - student, inverse_temperature, -offset);
    const float series = d * d * remainder_series(d);
    const float far = fmaf(q, mass_ratio, -p);
    // p = 0 makes d infinite or NaN; p d is 0 all the same.
    const float far_term = p > 0.0f ? fmaf(p, d, far) : far;
    const bool near = fabsf(d) < 0.5f;
    divergence += near ? p * series : far_term;
    return near ? p * (series - d) : far;
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
  cukit::Mass masses[HARD ? 3 : 2];
  const float scale = cukit::kLog2E * inverse_temperature;
  const int count = slice.count();
  // Thread t keeps its k-th vectors at (2 k + tensor) * THREADS + t.
  Vector* const mine = cache + threadIdx.x;
  for (int start = 0; start < count; start += kInFlight) {
    Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (start + i >= count) break;
      const int column = slice.column(threadIdx.x + (start + i) * THREADS);
      slice.read<cukit::kFirst>(of_student[i], student, column);
      slice.read<cukit::kFirst>(of_teacher[i], teacher, column);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (start + i >= count) break;
      if constexpr (CACHED) {
        mine[2 * (start + i) * THREADS] = of_student[i];
        mine[(2 * (start + i) + 1) * THREADS] = of_teacher[i];
      }
      float z[VEC];
      cukit::to_floats(z, of_student[i]);
      masses[kStudent].add(z, scale);
      if constexpr (HARD) masses[kPlain].add(z, cukit::kLog2E);
      cukit::to_floats(z, of_teacher[i]);
      masses[kTeacher].add(z, scale);
    }
  }
  exchange.merge(masses);

  const cukit::Mass student_mass = masses[kStudent];
  const cukit::Mass teacher_mass = masses[kTeacher];
  const bool active = student_mass.sum != 0.0f && teacher_mass.sum != 0.0f;
  SoftRow soft{scale, inverse_temperature, student_mass.reference, teacher_mass.reference, 0.0f, 1.0f};
  if (active) {
    soft.mass_ratio = teacher_mass.sum / student_mass.sum;
    soft.offset = cukit::kLn2 * ((teacher_mass.reference - student_mass.reference) +
                                 log2f(soft.mass_ratio));
  }
  const float upstream =
      GRAD ? cukit::upstream_scale(grad_loss, row * grad_loss_stride, normalizer) : 0.0f;
  const float per_mass = active ? 1.0f / teacher_mass.sum : 0.0f;
  const float soft_scale = soft_factor * upstream * per_mass;
  float hard_scale = 0.0f;
  float hard_scale_of_mass = 0.0f;
  if constexpr (HARD) {
    const cukit::Mass plain = masses[kPlain];
    if (plain.sum != 0.0f) {
      hard_scale = in_range ? hard_factor * upstream : cukit::not_a_number();
      hard_scale_of_mass = hard_scale / plain.sum;
    }
    if (writes_loss) {
      const float loss = cukit::kLn2 * cukit::log2_mass_over(plain, target_logit, cukit::kLog2E);
      hard_rows[row] = plain.sum == 0.0f ? 0.0f : in_range ? loss : cukit::not_a_number();
    }
  }

  float divergence = 0.0f;
  // Backwards: what was read last is the likeliest still in L2.
  for (int end = count; end > 0; end -= kInFlight) {
    Vector of_student[kInFlight], of_teacher[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = end - 1 - i;
      if (k < 0) break;
      if constexpr (CACHED) {
        of_student[i] = mine[2 * k * THREADS];
        of_teacher[i] = mine[(2 * k + 1) * THREADS];
      } else {
        const int column = slice.column(threadIdx.x + k * THREADS);
        slice.read<cukit::kLast>(of_student[i], student, column);
        slice.read<cukit::kLast>(of_teacher[i], teacher, column);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = end - 1 - i;
      if (k < 0) break;
      const int column = slice.column(threadIdx.x + k * THREADS);
      const bool has_target = HARD && target >= column && target < column + VEC;
      float z[VEC], teacher_z[VEC], g[VEC];
      cukit::to_floats(z, of_student[i]);
      cukit::to_floats(teacher_z, of_teacher[i]);
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        g[j] = soft.difference(z[j], teacher_z[j], part) * soft_scale;
        if constexpr (HARD) {
          const float plain = exp2f(fmaf(z[j], cukit::kLog2E, -masses[kPlain].reference));
          g[j] = fmaf(plain, hard_scale_of_mass, g[j]);
          if (has_target && column + j == target) g[j] -= hard_scale;
        }
      }
      divergence += part;
      if constexpr (GRAD) {
        cukit::from_floats(of_student[i], g);
        slice.write(grad, column, of_student[i]);
      }
    }
  }
  divergence = exchange.sum(divergence);
  if (writes_loss) {
    soft_rows[row] = active ? divergence * per_mass * soft_loss_factor : 0.0f;
  }
}
