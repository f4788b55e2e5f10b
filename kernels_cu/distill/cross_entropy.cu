// Cross-entropy of each row of logits with its target, and the gradient.
//
//   loss = (log sum_v exp z_v - z_target) * weight
//   grad = (softmax(z) - onehot(target)) * dz / dx * weight * factors.hard_gradient * grad_loss
//          / normalizer
//
// where distill/logits.cuh computes the logits z from the input x.
//
// Mapping: a cluster of CLUSTER blocks per row, each with its part of the columns. First sweep: the
//   row's mass, the denominator of the softmax. Second sweep (GRAD): the gradient, which may
//   overwrite the logits.
// Shared memory: CACHED * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements per access (tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED vectors per thread in shared memory; GRAD 0|1; TRANSFORM 0|1, see
//   distill/logits.cuh.
//   PHASE 0: whole rows; 1 (without GRAD) and 3: a shard of the columns, see distill/row_shard.cuh.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/logit_row.cuh"
#include "distill/parameters.cuh"
#include "distill/row_shard.cuh"

namespace {

using T = cukit::element_t;
using Exchange = cukit::RowExchange<1>;

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS) cross_entropy(
    const T* logits,                          // [rows, columns], with rows.row_stride
    const cukit::id_t* __restrict__ targets,  // [rows]
    const float* __restrict__ token_weights,  // [rows] or null
    float* __restrict__ row_losses,           // [rows]
    T* grad,                                  // like `logits`, may be the same; GRAD only
    const float* __restrict__ grad_loss,      // [rows] (stride 1) or scalar (stride 0), or null
    const float* __restrict__ normalizer,     // scalar or null
#if PHASE
    const float* __restrict__ gathered,  // [size, rows, kStateFloats]; PHASE 3
    float* own,                          // [rows, kStateFloats]; PHASE 1
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
  CUKIT_DYNAMIC_SHARED(cukit::LogitRow::Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets[row];
  const float weight = cukit::row_weight(token_weights, row, target == rows.ignore_index);
  if constexpr (GRAD) cukit::clear_padding(grad, row, rows, rank);
  if (weight == 0.0f) {
#if PHASE == 1
    if (writes_loss) cukit::RowState{}.write(own, row);
    return;
#endif
    if (writes_loss) row_losses[row] = 0.0f;
    if constexpr (GRAD) cukit::RowSlice(row, rows.row_stride, rows.columns, rank).clear(grad);
    return;
  }
  const cukit::Logits transform(factors.student);
  const bool in_range = target >= 0 && target < (PHASE ? shard.columns : rows.columns);
  const long long own_target = target - shard.first_column;
  const bool owned = PHASE ? own_target >= 0 && own_target < rows.columns : in_range;
  // Read before the barriers of the exchange: afterwards the gradient may overwrite it.
  const float target_logit =
      owned ? transform.of(cukit::to_float(logits[row * rows.row_stride + own_target])) : 0.0f;

  Exchange exchange(shared, rank);
  cukit::LogitRow values(logits, transform, cache, row, rows, rank);
  const float scales[1] = {cukit::kLog2E};
  cukit::Mass masses[1];
#if PHASE < 2
  values.add_to(masses, scales);
  exchange.merge(masses);
#else
  exchange.skip_merge();
  const cukit::RowState state = cukit::RowState::read(gathered, row, shard);
  masses[0] = state.plain;
#endif
#if PHASE == 1
  if (writes_loss) {
    cukit::RowState state;
    state.plain = masses[0];
    state.target_logit = target_logit;
    state.write(own, row);
  }
#else
  const cukit::Mass mass = masses[0];
  const bool active = mass.sum != 0.0f;

  if (writes_loss && shard.rank > 0) {
    row_losses[row] = 0.0f;
  } else if (writes_loss) {
#if PHASE
    const float logit = state.target_logit;
#else
    const float logit = target_logit;
#endif
    const float loss = cukit::kLn2 * cukit::log2_mass_over(mass, logit, cukit::kLog2E);
    row_losses[row] = !active ? 0.0f : in_range ? loss * weight : cukit::not_a_number();
  }
  if constexpr (GRAD) {
    if (!active) {
      values.slice.clear(grad);
      return;
    }
    float scale = factors.hard_gradient * weight *
                  cukit::upstream_scale(grad_loss, row * rows.grad_loss_stride, normalizer);
    if (!in_range) scale = cukit::not_a_number();
    const float scale_of_mass[1] = {scale / mass.sum};
    values.write_softmax(grad, masses, scales, scale_of_mass);
    // Overwritten by the thread that has just written this element.
    if (owned && values.slice.owns(static_cast<int>(own_target))) {
      const float q = mass.term(target_logit, cukit::kLog2E) * scale_of_mass[0];
      grad[values.slice.base + own_target] =
          cukit::from_float<T>(transform.chained(q - scale, target_logit));
    }
  }
#endif
}
