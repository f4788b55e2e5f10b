// Row-wise divergence between the teacher's and the student's softmax, and its gradient for the
// student's logits; optionally also the cross-entropy on a target, whose gradient is added.
//
//   p = softmax(teacher / T),  q = softmax(student / T)
//   soft = divergence(p, q) * factors.soft_loss * weight  (distill/divergence_rows.cuh)
//   hard = (log sum_v exp z_v - z_target) * weight, z = student                      (HARD)
//   grad = (d divergence / d (z / T) * factors.soft_gradient
//           + (softmax(z) - onehot(target)) * factors.hard_gradient)
//          * dz / dx * weight * grad_loss / normalizer
//
// where distill/logits.cuh computes the logits z from the input x.
//
// First sweep: the masses of both rows (the denominators of their softmaxes), and the teacher's
// mass weighted with teacher - student. These sums give the forward KL, sum_v p log(p / q), as a
// difference of two terms. If the difference is large compared with the terms, it is the loss, and
// the second sweep writes q - p. Otherwise student and teacher are close, and this difference and
// q - p would be mostly rounding errors: the second sweep sums non-negative terms, without
// cancellation.
// The gradients of the other divergences depend on a sum over the row: the second sweep sums the
// terms of the loss and q times the slopes (distill/divergence_rows.cuh), and a third writes the
// gradient. For the reverse KL the sum of q times the slopes is the loss, which the first sweep
// gives if student and teacher are far apart.
//
// Mapping: a cluster of CLUSTER blocks per row, each with its part of the columns. The gradient may
//   overwrite the student's logits.
// Shared memory: 2 * CACHED * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements per access (tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED vectors of each row per thread in shared memory; GRAD 0|1; HARD 0|1; DIVERGENCE
//   0..5, see distill/divergence_rows.cuh; TRANSFORM 0|1, see distill/logits.cuh.
//   PHASE 0: whole rows; 1..3: a shard of the columns, see distill/row_shard.cuh; 1, 2: without
//   GRAD.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/divergence_rows.cuh"
#include "distill/logit_row.cuh"
#include "distill/parameters.cuh"
#include "distill/row_shard.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

constexpr int kStudent = 0;
constexpr int kTeacher = 1;
constexpr int kPlain = 2;  // the student without temperature
constexpr int kMasses = HARD ? 3 : 2;
using Exchange = cukit::RowExchange<kMasses + (PHASE == 1 ? 2 : 0)>;
using Single = cukit::Vec<T, 1>;

using cukit::Choice;
using cukit::Sweep;

constexpr bool kReverse = cukit::kDivergence == cukit::Divergence::ReverseKl;
constexpr int kInFlight = 2;  // accesses per tensor that a thread issues before it uses the first
constexpr int kAhead = 4;     // batches of these accesses in flight to shared memory

// The first sweep's sums of one thread.
struct Statistics {
  cukit::Mass student, teacher, plain;
  float lowest_teacher = cukit::infinity();
  float lowest_student = cukit::infinity();
  float scale;
  cukit::Logits student_logits, teacher_logits;

  template <int N, int Batch>
  CUKIT_DEVICE void cover(const cukit::Vec<T, N> (&of_student)[Batch],
                          const cukit::Vec<T, N> (&of_teacher)[Batch]) {
    const float top = student_logits.of(cukit::extreme<cukit::Largest>(of_student));
    student.cover(top, scale);
    if constexpr (HARD) plain.cover(top, cukit::kLog2E);
    teacher.cover(teacher_logits.of(cukit::extreme<cukit::Largest>(of_teacher)), scale);
    // The lowest elements suffice, because the transform to logits is monotonic.
    lowest_teacher = fminf(lowest_teacher, cukit::extreme<cukit::Smallest>(of_teacher));
    if constexpr (DIVERGENCE != 0) {
      lowest_student = fminf(lowest_student, cukit::extreme<cukit::Smallest>(of_student));
    }
  }

  // Adds elements already passed to `cover`.
  template <int N>
  CUKIT_DEVICE void add(const cukit::Vec<T, N>& of_student, const cukit::Vec<T, N>& of_teacher) {
    float z[N], teacher_z[N];
    student_logits.load(z, of_student);
    teacher_logits.load(teacher_z, of_teacher);
    float student_sum = 0.0f, plain_sum = 0.0f, teacher_sum = 0.0f, moment = 0.0f, reverse = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float q = student.term(z[j], scale);
      student_sum += q;
      if constexpr (kReverse) reverse = fmaf(q, z[j] - teacher_z[j], reverse);
      if constexpr (HARD) plain_sum += plain.term(z[j], cukit::kLog2E);
      const float p = teacher.term(teacher_z[j], scale);
      teacher_sum += p;
      moment = fmaf(p, teacher_z[j] - z[j], moment);
    }
    student.sum += student_sum;
    plain.sum += plain_sum;
    teacher.sum += teacher_sum;
    teacher.moment += moment;
    if constexpr (kReverse) student.moment += reverse;
  }
};

// Minimum blocks per SM; 0: the compiler's choice, which makes variants with a transform spill.
constexpr int kMinBlocks = TRANSFORM ? 768 / THREADS : 0;

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, kMinBlocks) divergence(
    const T* student,                         // [rows, columns], with rows.row_stride
    const T* __restrict__ teacher,            // likewise, with rows.teacher_stride
    const cukit::id_t* __restrict__ targets,  // [rows]; null: no row is ignored (not with HARD)
    const float* __restrict__ token_weights,  // [rows] or null
    float* __restrict__ soft_rows,            // [rows]
    float* __restrict__ hard_rows,            // [rows]; HARD only
    T* grad,                                  // like `student`, may alias it; GRAD only
    const float* __restrict__ grad_loss,      // [rows] (stride 1) or scalar (stride 0), or null
    const float* __restrict__ normalizer,     // scalar or null
#if PHASE
    const float* __restrict__ gathered,  // [size, rows, kStateFloats]; PHASE 2 and 3
    float* own,                          // PHASE 1: [rows, kStateFloats], 2 and 3: [rows, 2]
#endif
    const cukit::LogitRows rows,
#if PHASE
    const cukit::RowShard shard,
#endif
    const cukit::LossFactors factors) {
#if !PHASE
  constexpr cukit::RowShard shard{};
#endif
  __shared__ Exchange::Shared shared;
  CUKIT_DYNAMIC_SHARED(Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const cukit::RowSlice slice(row, rows.row_stride, rows.columns, rank);
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets != nullptr ? targets[row] : 0;
  const bool ignored = targets != nullptr && target == rows.ignore_index;
  // Reloaded at each use: the sweeps need the registers.
  const auto weight = [&] { return cukit::row_weight(token_weights, row, false); };
  if constexpr (GRAD) cukit::clear_padding(grad, row, rows, rank);
  if (ignored || weight() == 0.0f) {
#if PHASE == 1
    if (writes_loss) cukit::RowState{}.write(own, row);
#elif PHASE == 2
    if (writes_loss) own[2 * row] = own[2 * row + 1] = 0.0f;
#else
    if (writes_loss) soft_rows[row] = 0.0f;
    if (HARD && writes_loss) hard_rows[row] = 0.0f;
    if constexpr (GRAD) slice.clear(grad);
#endif
    return;
  }
  teacher += row * (rows.teacher_stride - rows.row_stride);  // so that the student's offsets apply
  const bool in_range = target >= 0 && target < (PHASE ? shard.columns : rows.columns);
  const long long own_target = target - shard.first_column;
  const bool owned = PHASE ? own_target >= 0 && own_target < rows.columns : in_range;
  Single target_student, target_teacher;
  if (HARD && owned) {
    // Read before the barriers of the exchange: afterwards the gradient may overwrite the logits.
    target_student[0] = student[slice.base + own_target];
    target_teacher[0] = teacher[slice.base + own_target];
  }

  Exchange exchange(shared, rank);
  Statistics statistics;
  statistics.scale = cukit::kLog2E * factors.inverse_temperature;
  statistics.student_logits = cukit::Logits(factors.student);
  statistics.teacher_logits = cukit::Logits(factors.teacher);
  const bool has_scalar = slice.scalar_column >= 0;
  const int kept = min(slice.count, CACHED);
  Single scalar_student[1], scalar_teacher[1];
  if (has_scalar) {
    scalar_student[0][0] = student[slice.base + slice.scalar_column];
    scalar_teacher[0][0] = teacher[slice.base + slice.scalar_column];
  }
  // Thread t caches its k-th vectors at (2 k + tensor) * THREADS + t.
  Vector* const mine = cache + threadIdx.x;
  const auto slot = [&](int k, int tensor) { return mine + (2 * k + tensor) * THREADS; };
#if PHASE < 2
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
  if (has_scalar) {
    statistics.cover(scalar_student, scalar_teacher);
    statistics.add(scalar_student[0], scalar_teacher[0]);
  }
  cukit::Mass masses[kMasses + (PHASE == 1 ? 2 : 0)];
  masses[kStudent] = statistics.student;
  masses[kTeacher] = statistics.teacher;
  if constexpr (HARD) masses[kPlain] = statistics.plain;
#if PHASE == 1
  masses[kMasses] = cukit::lowest_as_mass(statistics.lowest_student);
  masses[kMasses + 1] = cukit::lowest_as_mass(statistics.lowest_teacher);
#endif
  exchange.merge(masses);
#endif
#if PHASE == 1
  if (writes_loss) {
    cukit::RowState state;
    state.student = masses[kStudent];
    state.teacher = masses[kTeacher];
    if constexpr (HARD) state.plain = masses[kPlain];
    if (HARD && owned) {
      state.target_logit = statistics.student_logits.of(cukit::to_float(target_student[0]));
    }
    state.lowest_student = -masses[kMasses].reference;
    state.lowest_teacher = -masses[kMasses + 1].reference;
    state.write(own, row);
  }
#else
#if PHASE
  exchange.skip_merge();
  const cukit::RowState state = cukit::RowState::read(gathered, row, shard);
  const cukit::Mass masses[3] = {state.student, state.teacher, state.plain};
  statistics.lowest_student = state.lowest_student;
  statistics.lowest_teacher = state.lowest_teacher;
#endif

  cukit::DivergenceRow soft;
  soft.scale = statistics.scale;
  soft.student_logits = statistics.student_logits;
  soft.teacher_logits = statistics.teacher_logits;
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
      GRAD ? weight() * cukit::upstream_scale(grad_loss, row * rows.grad_loss_stride, normalizer)
           : 0.0f;
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
    if (PHASE == 3 && writes_loss && shard.rank > 0) {
      hard_rows[row] = 0.0f;
    } else if (PHASE != 2 && writes_loss) {
#if PHASE
      const float logit = state.target_logit;
#else
      const float logit =
          in_range ? soft.student_logits.of(cukit::to_float(target_student[0])) : 0.0f;
#endif
      const float loss = cukit::kLn2 * cukit::log2_mass_over(soft.plain, logit, cukit::kLog2E);
      const float counted = in_range ? loss * weight() : cukit::not_a_number();
      hard_rows[row] = soft.plain.sum == 0.0f ? 0.0f : counted;
    }
  }

  // Calls visit(student vector, teacher vector, write) for all vectors of this thread, from the
  // last to the first; write(gradient) stores the corresponding vector of the gradient.
  const auto sweep_again = [&](const auto& visit) {
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
        visit(of_student[i], of_teacher[i],
              [&](const Vector& gradient) { slice.write(grad, k, gradient); });
      }
    });
    if (has_scalar) {
      visit(scalar_student[0], scalar_teacher[0], [&](const Single& gradient) {
        grad[slice.base + slice.scalar_column] = gradient[0];
      });
    }
  };
  // Writes the gradient; returns this thread's part of the forward KL, except with Sweep::Apart.
  const auto gradient_sweep = [&](auto choice) {
    constexpr Sweep kSweep = decltype(choice)::kSweep;
    float divergence = 0.0f;
    sweep_again([&](const auto& of_student, const auto& of_teacher, const auto& write) {
      auto gradient = of_student;
      float part = 0.0f;
      cukit::gradient_of<kSweep>(soft, gradient, of_student, of_teacher, part);
      divergence += part;
      if constexpr (GRAD) write(gradient);
    });
    // The thread that has just written this element overwrites it.
    if (GRAD && HARD && owned && slice.owns(static_cast<int>(own_target))) {
      Single gradient;
      float counted = 0.0f;
      cukit::gradient_of<kSweep>(soft, gradient, target_student, target_teacher, counted,
                                 soft.hard_scale);
      grad[slice.base + own_target] = gradient[0];
    }
    return divergence;
  };
#if DIVERGENCE == 0
  if (active && soft.far_apart()) {
    if constexpr (GRAD) gradient_sweep(Choice<Sweep::Apart>{});
    if (writes_loss) {
      // All ranks have the total loss, so only rank 0 writes it.
      soft_rows[row] = shard.rank > 0 ? 0.0f : soft.divergence() * factors.soft_loss * weight();
    }
    return;
  }
  // Decided per thread: masked columns are usually adjacent.
  const float lowest_teacher = soft.teacher_logits.of(statistics.lowest_teacher);
  const float divergence = exchange.sum(soft.ratios_fit(lowest_teacher)
                                            ? gradient_sweep(Choice<Sweep::Close>{})
                                            : gradient_sweep(Choice<Sweep::Masked>{}));
  if (writes_loss) {
    soft_rows[row] = active ? divergence * per_mass * factors.soft_loss * weight() : 0.0f;
  }
#else
  soft.soft_scale = active ? factors.soft_gradient * upstream / soft.student.sum : 0.0f;
  soft.beta = factors.beta;
  if (!active) soft.student.reference = -cukit::kNoMass;  // q = 0 everywhere
  // Decided per thread: masked columns are usually adjacent.
  const bool fit = active && soft.ratios_fit(soft.student_logits.of(statistics.lowest_student),
                                   soft.teacher_logits.of(statistics.lowest_teacher));
  const auto write_gradient = [&] {
    if constexpr (GRAD) {
      // The reverse KL may be infinite; with weight 0 its gradient is 0, as if q were 0 everywhere.
      const bool dropped = kReverse && soft.soft_scale == 0.0f;
      if (dropped) soft.student.reference = -cukit::kNoMass;
      fit && !dropped ? gradient_sweep(Choice<Sweep::Apart>{})
                      : gradient_sweep(Choice<Sweep::Masked>{});
    }
  };
  if (kReverse && active && soft.reversely_far_apart()) {
    soft.centre = soft.reverse_divergence();
#if PHASE == 2
    if (writes_loss) own[2 * row] = own[2 * row + 1] = 0.0f;
    return;
#endif
    if (writes_loss) {
      soft_rows[row] = shard.rank > 0 ? 0.0f : soft.centre * factors.soft_loss * weight();
    }
    write_gradient();
    return;
  }
  soft.far = active && !kReverse && soft.far_apart(soft.share_of_kl());
  cukit::Mass sums[1];
  sums[0].reference = 0.0f;  // unscaled sums
#if PHASE == 3
  sums[0].sum = own[2 * row];
  sums[0].moment = own[2 * row + 1];
#else
  __shared__ cukit::RowExchange<1>::Shared shared_sums;
  cukit::RowExchange<1> second_exchange(shared_sums, rank);
  const auto sum_sweep = [&](auto choice) {
    sweep_again([&](const auto& of_student, const auto& of_teacher, const auto&) {
      soft.template add<decltype(choice)::kSweep>(sums[0], of_student, of_teacher);
    });
  };
  if (!fit) {
    sum_sweep(Choice<Sweep::Masked>{});
  } else if (soft.far) {
    sum_sweep(Choice<Sweep::Apart>{});
  } else {
    sum_sweep(Choice<Sweep::Close>{});
  }
  second_exchange.merge(sums);
#endif
#if PHASE == 2
  if (writes_loss) {
    own[2 * row] = sums[0].sum;
    own[2 * row + 1] = sums[0].moment;
  }
#else
  soft.centre = sums[0].moment * per_mass;
  if (writes_loss) {
    const float loss = active ? soft.loss_of(sums[0].sum * per_mass) : 0.0f;
    soft_rows[row] = shard.rank > 0 ? 0.0f : loss * factors.soft_loss * weight();
  }
  write_gradient();
#endif
#endif
#endif  // PHASE != 1
}
