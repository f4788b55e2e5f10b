// Cross-entropy of each row of logits with its target, and the gradient.
//
//   loss = log sum_v exp z_v - z_target
//   grad = (softmax(z) - onehot(target)) * factor * grad_loss / normalizer
//
// Mapping: a cluster of CLUSTER blocks a row, each with its part of the columns. First sweep: the
//   row's mass. Second sweep (GRAD): the gradient, which may overwrite the logits.
// Shared memory: with CACHED each thread keeps its vectors of the row between the sweeps,
//   ceil(ceil((columns / VEC + 1) / CLUSTER) / THREADS) * THREADS * VEC * sizeof(DTYPE) bytes.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64 of the targets; THREADS multiple of 32,
//   32..1024; VEC elements an access (the tensors are aligned to it, rows need not be); CLUSTER
//   1|2|4|8; CACHED 0|1; GRAD 0|1.
// Minimum architecture: sm_80, sm_90 with CLUSTER > 1. Sums in float in a fixed order:
// deterministic. Reference: cukit/reference/losses.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/vocabulary_row.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;
using Exchange = cukit::RowExchange<1>;

constexpr int kInFlight = 4;  // accesses that a thread issues before it uses the first

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
  CUKIT_DYNAMIC_SHARED(Vector, cache);
  const long long row = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const cukit::RowSlice slice(row, row_stride, columns, rank);
  const bool writes_loss = rank == 0 && threadIdx.x == 0;
  const long long target = targets[row];
  if (target == ignore_index) {
    if (writes_loss) row_losses[row] = 0.0f;
    if constexpr (GRAD) slice.clear(grad);
    return;
  }
  const bool in_range = target >= 0 && target < columns;
  // Before the barriers of the exchange: after them the gradient may overwrite it.
  const float target_logit = in_range ? cukit::to_float(logits[slice.base + target]) : 0.0f;

  Exchange exchange(shared, rank);
  cukit::Mass masses[1];
  const int count = slice.count();
  for (int start = 0; start < count; start += kInFlight) {
    Vector batch[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int vec = threadIdx.x + (start + i) * THREADS;
      if (start + i < count) slice.read<cukit::kFirst>(batch[i], logits, slice.column(vec));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (start + i >= count) break;
      if constexpr (CACHED) cache[threadIdx.x + (start + i) * THREADS] = batch[i];
      float z[VEC];
      cukit::to_floats(z, batch[i]);
      masses[0].add(z, cukit::kLog2E);
    }
  }
  exchange.merge(masses);
  const cukit::Mass mass = masses[0];
  const bool active = mass.sum != 0.0f;

  if (writes_loss) {
    const float loss = cukit::kLn2 * cukit::log2_mass_over(mass, target_logit, cukit::kLog2E);
    row_losses[row] = !active ? 0.0f : in_range ? loss : cukit::not_a_number();
  }
  if constexpr (GRAD) {
    if (!active) {
      slice.clear(grad);
      return;
    }
    float scale = factor * cukit::upstream_scale(grad_loss, row * grad_loss_stride, normalizer);
    if (!in_range) scale = cukit::not_a_number();
    const float scale_of_mass = scale / mass.sum;
    // Backwards: what was read last is the likeliest still in L2.
    for (int end = count; end > 0; end -= kInFlight) {
      Vector batch[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int vec = threadIdx.x + (end - 1 - i) * THREADS;
        if (end - 1 - i < 0) break;
        if constexpr (CACHED) {
          batch[i] = cache[vec];
        } else {
          slice.read<cukit::kLast>(batch[i], logits, slice.column(vec));
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (end - 1 - i < 0) break;
        const int column = slice.column(threadIdx.x + (end - 1 - i) * THREADS);
        const bool has_target = target >= column && target < column + VEC;
        float z[VEC];
        cukit::to_floats(z, batch[i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          z[j] = exp2f(fmaf(z[j], cukit::kLog2E, -mass.reference)) * scale_of_mass;
          if (has_target && column + j == target) z[j] -= scale;
        }
        cukit::from_floats(batch[i], z);
        slice.write(grad, column, batch[i]);
      }
    }
  }
}
