// KL divergence of each row from K = num_known tokens of a teacher, with the gradient for the
// student's logits; optionally the cross-entropy on a target mixed into both.
//
//   q = softmax(student / T)
//   TAIL 0, top-k tokens only: p_k = exp(log_probs_k) / sum_j exp(log_probs_j)
//             d_k = log p_k - log q_k
//             soft = sum_k p_k (expm1(-d_k) + d_k) + q_r
//             grad_k = q_k - p_k,  elsewhere q
//   TAIL 1, top-k tokens, and all other tokens merged into one token r: p_k = exp(log_probs_k)
//             soft = sum_k p_k (expm1(-d_k) + d_k) + the same term of p_r and q_r
//             grad_k = q_k - p_k,  elsewhere q (1 - p_r / q_r)
//   TAIL 2, samples, which may repeat, weighted with w_k = sample_weights_k or 1 / K:
//             soft = sum_k w_k (log_probs_k - log q_k), with 0 for missing log_probs
//             grad_v = q_v sum_k w_k - sum of the w_k whose token is v
//   with q_r = 1 - sum_k q_k and p_r = 1 - sum_k p_k; soft times factors.soft_loss * weight.
//   hard = (log sum_v exp z_v - z_target) * weight, z = student                      (HARD)
//   The gradient is (grad of soft * factors.soft_gradient + grad of hard * factors.hard_gradient)
//     * dz / dx * weight * grad_loss / normalizer, where distill/logits.cuh computes the logits z
//     from the input x.
//
// Mapping: a cluster of CLUSTER blocks per row, each with its part of the columns; every block
//   reads the K tokens. First sweep: the row's masses, the denominators of its softmaxes. Second
//   sweep (GRAD): the gradient; the block then overwrites that of the target and of the K tokens.
//   The gradient may overwrite the logits. Samples are compared pairwise: K^2 / THREADS steps per
//   thread.
// Shared memory: CACHED * THREADS * VEC * sizeof(DTYPE) bytes, dynamic; 4 MAX_KNOWN bytes and less
//   than 1.5 KiB for reductions, static.
// Macros: those of distill/logit_row.cuh; ID int32|int64 of the targets; MAX_KNOWN: largest K; GRAD
//   0|1; TAIL 0|1|2; HARD 0|1.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/reduce.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/logit_row.cuh"
#include "distill/parameters.cuh"

namespace {

using T = cukit::element_t;

constexpr bool kBucket = TAIL == 1;
constexpr bool kSamples = TAIL == 2;
constexpr int kMasses = HARD ? 2 : 1;  // at T, and without temperature
using Exchange = cukit::RowExchange<kMasses>;

constexpr float kNear = 0.125f;

// p (expm1(-d) + d) with d = log p - log q, non-negative; near d = 0 a Taylor series.
CUKIT_DEVICE float term(float p, float q, float d) {
  float series = fmaf(d, 1.0f / 720, -1.0f / 120);
  series = fmaf(series, d, 1.0f / 24);
  series = fmaf(series, d, -1.0f / 6);
  series = fmaf(series, d, 1.0f / 2);
  if (p == 0.0f) return q;
  return fabsf(d) < kNear ? p * (d * d * series) : fmaf(p, d, q - p);
}

// Minimum blocks per SM; 0: the compiler's choice, which makes variants for samples spill on sm_80.
constexpr int kMinBlocks = TAIL == 2 || TRANSFORM ? 768 / THREADS : 0;

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, kMinBlocks) topk_divergence(
    const T* student,                              // [rows, columns], with rows.row_stride
    const float* __restrict__ teacher_log_probs,  // [rows, num_known]; null: zeros (TAIL 2)
    const float* __restrict__ sample_weights,     // [rows, num_known] or null; TAIL 2 only
    const int* __restrict__ teacher_ids,          // [rows, num_known]
    const cukit::id_t* __restrict__ targets,      // [rows]; null without HARD: no row is ignored
    const float* __restrict__ token_weights,      // [rows] or null
    float* __restrict__ soft_rows,                // [rows]
    float* __restrict__ hard_rows,                // [rows]; HARD only
    T* grad,                                      // like `student`, may be the same; GRAD only
    const float* __restrict__ grad_loss,          // [rows] (stride 1) or scalar (stride 0), or null
    const float* __restrict__ normalizer,         // scalar or null
    const cukit::LogitRows rows, int num_known, const cukit::LossFactors factors) {
  __shared__ Exchange::Shared shared;
  __shared__ float logits[MAX_KNOWN];  // of the known tokens
  __shared__ float scratch[2 * (THREADS / cukit::kWarpSize)];
  CUKIT_DYNAMIC_SHARED(cukit::LogitRow::Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets != nullptr ? targets[row] : 0;
  const bool ignored = targets != nullptr && target == rows.ignore_index;
  const float weight = cukit::row_weight(token_weights, row, ignored);
  if constexpr (GRAD) cukit::clear_padding(grad, row, rows, rank);
  if (weight == 0.0f) {
    if (writes_loss) soft_rows[row] = 0.0f;
    if (HARD && writes_loss) hard_rows[row] = 0.0f;
    if constexpr (GRAD) cukit::RowSlice(row, rows.row_stride, rows.columns, rank).clear(grad);
    return;
  }
  const long long first = row * num_known;
  const int* const ids = teacher_ids + first;
  const auto known_log_prob = [&](int k) {
    return kSamples && teacher_log_probs == nullptr ? 0.0f : teacher_log_probs[first + k];
  };
  const auto known_weight = [&](int k) {  // in the sum over the known tokens
    if constexpr (kSamples) {
      return sample_weights != nullptr ? sample_weights[first + k] : 1.0f / num_known;
    }
    return expf(teacher_log_probs[first + k]);
  };
  Exchange exchange(shared, rank);
  const cukit::Logits transform(factors.student);
  cukit::LogitRow values(student, transform, cache, row, rows, rank);
  const auto logit = [&](int column) {
    return transform.of(cukit::to_float(student[values.slice.base + column]));
  };
  // Read before the barriers of the exchange: afterwards the gradient may overwrite the logits.
  const bool target_in_range = target >= 0 && target < rows.columns;
  const float target_logit = HARD && target_in_range ? logit(static_cast<int>(target)) : 0.0f;
  float known[2] = {0.0f, 0.0f};  // the sum of weights; the number of tokens out of range
  for (int k = threadIdx.x; k < num_known; k += THREADS) {
    const int id = ids[k];
    const float share = known_weight(k);
    const bool in_range = id >= 0 && id < rows.columns;
    logits[k] = in_range ? logit(id) : 0.0f;
    known[0] += share;
    known[1] += in_range || (kSamples && share == 0.0f) ? 0.0f : 1.0f;
  }
  cukit::block_reduce<cukit::Sum, THREADS>(known, scratch);
  const float known_p = known[0];
  const bool all_in_range = known[1] == 0.0f;

  const float scale = cukit::kLog2E * factors.inverse_temperature;
  float scales[kMasses] = {scale};
  if constexpr (HARD) scales[kMasses - 1] = cukit::kLog2E;
  cukit::Mass masses[kMasses];
  values.add_to(masses, scales);
  exchange.merge(masses);
  const cukit::Mass mass = masses[0], plain = masses[kMasses - 1];
  const bool hard = HARD && plain.sum != 0.0f;
  const bool active = mass.sum != 0.0f && known_p != 0.0f;
  if (HARD && writes_loss) {
    const float loss = cukit::kLn2 * cukit::log2_mass_over(plain, target_logit, cukit::kLog2E);
    hard_rows[row] = !hard ? 0.0f : target_in_range ? loss * weight : cukit::not_a_number();
  }
  if (!active && writes_loss) soft_rows[row] = 0.0f;
  if (!active && !hard) {
    if constexpr (GRAD) values.slice.clear(grad);
    return;
  }
  const float per_mass = active ? 1.0f / mass.sum : 0.0f;
  const float log2_mass = active ? log2f(mass.sum) : 0.0f;
  const float log_known = TAIL == 0 ? logf(known_p) : 0.0f;
  struct Token { float p, q, d; };
  const auto token = [&](int k) {
    const float exponent = mass.exponent(logits[k], scale);
    const float q = exp2f(exponent) * per_mass;
    const float log_q = cukit::kLn2 * (exponent - log2_mass);
    const float log_p = known_log_prob(k) - log_known;
    return Token{kSamples ? known_weight(k) : expf(log_p), q, log_p - log_q};
  };
  float sums[2] = {0.0f, 0.0f};  // of the terms, and of q
  for (int k = threadIdx.x; k < num_known; k += THREADS) {
    const Token at = token(k);
    if constexpr (kSamples) {
      sums[0] += at.p != 0.0f ? at.p * at.d : 0.0f;
    } else {
      sums[0] += term(at.p, at.q, at.d);
    }
    sums[1] += at.q;
  }
  cukit::block_reduce<cukit::Sum, THREADS>(sums, scratch);
  // q_r is 1 minus a sum; with TAIL 1, which divides by q_r, at least that difference's rounding
  // error.
  const float rest_q = fmaxf(1.0f - sums[1], kBucket ? 0x1p-24f : 0.0f);
  const float rest_p = kBucket ? fmaxf(1.0f - known_p, 0.0f) : 0.0f;
  if (active && writes_loss) {
    float loss = sums[0];
    if constexpr (!kSamples) loss += term(rest_p, rest_q, logf(rest_p) - logf(rest_q));
    soft_rows[row] = all_in_range ? loss * factors.soft_loss * weight : cukit::not_a_number();
  }
  if constexpr (GRAD) {
    const float upstream =
        weight * cukit::upstream_scale(grad_loss, row * rows.grad_loss_stride, normalizer);
    float soft_scale = active ? factors.soft_gradient * upstream : 0.0f;
    if (active && !all_in_range) soft_scale = cukit::not_a_number();
    float hard_scale = hard ? factors.hard_gradient * upstream : 0.0f;
    if (hard && !target_in_range) hard_scale = cukit::not_a_number();
    const float hard_of_mass = hard ? hard_scale / plain.sum : 0.0f;
    const float rest = kSamples ? known_p : rest_p == 0.0f ? 1.0f : 1.0f - rest_p / rest_q;
    float of_masses[kMasses] = {soft_scale * rest * per_mass};
    if constexpr (HARD) of_masses[kMasses - 1] = hard_of_mass;
    values.write_softmax(grad, masses, scales, of_masses);
    __syncthreads();  // before elements written by other threads are overwritten
    // Writes the gradient of a token of this block, given `difference` = d soft / d (z / T).
    const auto write = [&](int column, float z, float difference) {
      float g = soft_scale * difference;
      if constexpr (HARD) {
        g = fmaf(plain.term(z, cukit::kLog2E), hard_of_mass, g);
        g -= column == target ? hard_scale : 0.0f;
      }
      grad[values.slice.base + column] = cukit::from_float<T>(transform.chained(g, z));
    };
    if constexpr (HARD) {
      const int column = static_cast<int>(target);
      if (threadIdx.x == 0 && target_in_range && values.slice.block_owns(column)) {
        write(column, target_logit, rest * mass.term(target_logit, scale) * per_mass);
      }
      __syncthreads();  // the target may be one of the K tokens
    }
    for (int k = threadIdx.x; k < num_known; k += THREADS) {
      const int id = ids[k];
      if (!active || !all_in_range || id < 0 || id >= rows.columns) continue;
      if (!values.slice.block_owns(id)) continue;
      const Token at = token(k);
      float difference = fabsf(at.d) < kNear ? at.p * expm1f(-at.d) : at.q - at.p;
      if constexpr (kSamples) {
        float sampled = 0.0f;
        bool written = false;  // whether an earlier sample of this token writes it
        for (int other = 0; other < num_known; ++other) {
          if (ids[other] != id) continue;
          written |= other < k;
          sampled += known_weight(other);
        }
        if (written) continue;
        difference = fmaf(known_p, at.q, -sampled);
      }
      write(id, logits[k], difference);
    }
  }
}
