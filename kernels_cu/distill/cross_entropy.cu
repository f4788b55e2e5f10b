// Cross-entropy of each row of logits with its target, and the gradient.
//
//   loss = log sum_v exp z_v - z_target
//   grad = (softmax(z) - onehot(target)) * factor * grad_loss / normalizer
//
// Mapping: a cluster of CLUSTER blocks a row, each with its part of the columns. First sweep: the
//   row's mass. Second sweep (GRAD): the gradient, which may overwrite the logits.
// Shared memory: CACHED * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements an access (the tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED vectors of the row that a thread keeps; GRAD 0|1.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/logit_row.cuh"

namespace {

using T = cukit::element_t;
using Exchange = cukit::RowExchange<1>;

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS) cross_entropy(
    const T* logits,                          // [rows, columns], row_stride elements a row
    const cukit::id_t* __restrict__ targets,  // [rows]
    float* __restrict__ row_losses,           // [rows]
    T* grad,                                  // as `logits`, or the same; GRAD only
    const float* __restrict__ grad_loss,      // [rows] (stride 1) or scalar (stride 0), or null
    const float* __restrict__ normalizer,     // scalar or null
    long long ignore_index, long long row_stride, int columns, int grad_loss_stride, float factor) {
  __shared__ Exchange::Shared shared;
  CUKIT_DYNAMIC_SHARED(cukit::LogitRow::Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets[row];
  if (target == ignore_index) {
    if (writes_loss) row_losses[row] = 0.0f;
    if constexpr (GRAD) cukit::RowSlice(row, row_stride, columns, rank).clear(grad);
    return;
  }
  const bool in_range = target >= 0 && target < columns;
  // Before the barriers of the exchange: after them the gradient may overwrite it.
  const float target_logit = in_range ? cukit::to_float(logits[row * row_stride + target]) : 0.0f;

  Exchange exchange(shared, rank);
  cukit::LogitRow values(logits, cache, row, row_stride, columns, rank);
  cukit::Mass masses[1] = {values.mass(cukit::kLog2E)};
  exchange.merge(masses);
  const cukit::Mass mass = masses[0];
  const bool active = mass.sum != 0.0f;

  if (writes_loss) {
    const float loss = cukit::kLn2 * cukit::log2_mass_over(mass, target_logit, cukit::kLog2E);
    row_losses[row] = !active ? 0.0f : in_range ? loss : cukit::not_a_number();
  }
  if constexpr (GRAD) {
    if (!active) {
      values.slice.clear(grad);
      return;
    }
    float scale = factor * cukit::upstream_scale(grad_loss, row * grad_loss_stride, normalizer);
    if (!in_range) scale = cukit::not_a_number();
    const float scale_of_mass = scale / mass.sum;
    values.write_softmax(grad, mass, cukit::kLog2E, scale_of_mass);
    // By the thread that has just written there.
    if (in_range && values.slice.owns(static_cast<int>(target))) {
      const float q = mass.term(target_logit, cukit::kLog2E) * scale_of_mass;
      grad[values.slice.base + target] = cukit::from_float<T>(q - scale);
    }
  }
}
