// KL divergence of each row from a teacher of whom K probabilities are known, with the gradient for the
// student's logits.
//
//   p_k = exp(teacher_log_probs_k),  q = softmax(student / T),  d_k = log p_k - log q_k
//   BUCKET 0: p is divided by its sum.        soft = sum_k p_k (expm1(-d_k) + d_k) + q_r
//             grad_k = q_k - p_k,  elsewhere q
//   BUCKET 1: all other tokens are one more.  soft = sum_k p_k (expm1(-d_k) + d_k) + the same of p_r, q_r
//             grad_k = q_k - p_k,  elsewhere q (1 - p_r / q_r)
//   with q_r = 1 - sum_k q_k and p_r = 1 - sum_k p_k; both times factors.soft_*.
//
// Mapping: a cluster of CLUSTER blocks a row, each with its part of the columns; every block reads the K
//   tokens. First sweep: the row's mass. Second sweep (GRAD): the gradient but for the K tokens, which
//   the block writes afterwards. The gradient may overwrite the logits.
// Shared memory: CACHED * THREADS * VEC * sizeof(DTYPE) bytes, dynamic; 4 MOST bytes static.
// Macros: those of distill/logit_row.cuh; ID int32|int64 of the targets; MOST tokens of a row; GRAD 0|1;
//   BUCKET 0|1.
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
using Exchange = cukit::RowExchange<1>;

constexpr float kNear = 0.125f;

// p (expm1(-d) + d) with d = log p - log q, at least 0; near d = 0 a Taylor series.
CUKIT_DEVICE float term(float p, float q, float d) {
  float series = fmaf(d, 1.0f / 720, -1.0f / 120);
  series = fmaf(series, d, 1.0f / 24);
  series = fmaf(series, d, -1.0f / 6);
  series = fmaf(series, d, 1.0f / 2);
  if (p == 0.0f) return q;
  return fabsf(d) < kNear ? p * (d * d * series) : fmaf(p, d, q - p);
}

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS) topk_divergence(
    const T* student,                              // [rows, columns], row_stride elements a row
    const float* __restrict__ teacher_log_probs,  // [rows, num_known]
    const int* __restrict__ teacher_ids,          // likewise
    const cukit::id_t* __restrict__ targets,      // [rows]; null: no row is ignored
    float* __restrict__ soft_rows,                // [rows]
    T* grad,                                      // as `student`, or the same; GRAD only
    const float* __restrict__ grad_loss,          // [rows] (stride 1) or scalar (stride 0), or null
    const float* __restrict__ normalizer,         // scalar or null
    const cukit::LogitRows rows, int num_known, const cukit::DivergenceFactors factors) {
  __shared__ Exchange::Shared shared;
  __shared__ float logits[MOST];  // of the known tokens
  __shared__ float scratch[2 * (THREADS / cukit::kWarpSize)];
  CUKIT_DYNAMIC_SHARED(cukit::LogitRow::Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  if (targets != nullptr && targets[row] == rows.ignore_index) {
    if (writes_loss) soft_rows[row] = 0.0f;
    if constexpr (GRAD) cukit::RowSlice(row, rows.row_stride, rows.columns, rank).clear(grad);
    return;
  }
  const float* const known_log_probs = teacher_log_probs + row * num_known;
  const int* const ids = teacher_ids + row * num_known;
  Exchange exchange(shared, rank);
  cukit::LogitRow values(student, cache, row, rows.row_stride, rows.columns, rank);
  // Before the barriers of the exchange: after them the gradient may overwrite the logits.
  float known[2] = {0.0f, 0.0f};  // the known tokens' sum of p, later of q; how many are out of range
  for (int k = threadIdx.x; k < num_known; k += THREADS) {
    const int id = ids[k];
    const bool in_range = id >= 0 && id < rows.columns;
    logits[k] = in_range ? cukit::to_float(student[values.slice.base + id]) : 0.0f;
    known[0] += expf(known_log_probs[k]);
    known[1] += in_range ? 0.0f : 1.0f;
  }
  cukit::block_reduce<cukit::Sum, THREADS>(known, scratch);
  const float known_p = known[0];
  const bool all_in_range = known[1] == 0.0f;

  const float scale = cukit::kLog2E * factors.inverse_temperature;
  cukit::Mass masses[1] = {values.mass(scale)};
  exchange.merge(masses);
  const cukit::Mass mass = masses[0];
  const bool active = mass.sum != 0.0f && known_p != 0.0f;
  if (!active) {
    if (writes_loss) soft_rows[row] = 0.0f;
    if constexpr (GRAD) values.slice.clear(grad);
    return;
  }
  const float per_mass = 1.0f / mass.sum;
  const float log2_mass = log2f(mass.sum);
  const float log_known = BUCKET ? 0.0f : logf(known_p);
  struct Token { float p, q, d; };
  const auto token = [&](int k) {
    const float log_p = known_log_probs[k] - log_known;
    const float exponent = mass.exponent(logits[k], scale);
    return Token{expf(log_p), exp2f(exponent) * per_mass,
                 log_p - cukit::kLn2 * (exponent - log2_mass)};
  };
  float sums[2] = {0.0f, 0.0f};  // of the terms, and of q
  for (int k = threadIdx.x; k < num_known; k += THREADS) {
    const Token at = token(k);
    sums[0] += term(at.p, at.q, at.d);
    sums[1] += at.q;
  }
  cukit::block_reduce<cukit::Sum, THREADS>(sums, scratch);
  // The rest is a difference from 1: below its rounding it counts as that.
  const float rest_q = fmaxf(1.0f - sums[1], BUCKET ? 0x1p-24f : 0.0f);
  const float rest_p = BUCKET ? fmaxf(1.0f - known_p, 0.0f) : 0.0f;
  if (writes_loss) {
    const float loss = sums[0] + term(rest_p, rest_q, logf(rest_p) - logf(rest_q));
    soft_rows[row] = all_in_range ? loss * factors.soft_loss : cukit::not_a_number();
  }
  if constexpr (GRAD) {
    float soft_scale = factors.soft_gradient *
                       cukit::upstream_scale(grad_loss, row * rows.grad_loss_stride, normalizer);
    if (!all_in_range) soft_scale = cukit::not_a_number();
    const float rest = rest_p == 0.0f ? 1.0f : 1.0f - rest_p / rest_q;
    values.write_softmax(grad, mass, scale, soft_scale * rest * per_mass);
    __syncthreads();  // the block's threads have written what the known tokens overwrite
    for (int k = threadIdx.x; k < num_known; k += THREADS) {
      const Token at = token(k);
      if (!all_in_range || !values.slice.block_owns(ids[k])) continue;
      const float difference = fabsf(at.d) < kNear ? at.p * expm1f(-at.d) : at.q - at.p;
      grad[values.slice.base + ids[k]] = cukit::from_float<T>(soft_scale * difference);
    }
  }
}
