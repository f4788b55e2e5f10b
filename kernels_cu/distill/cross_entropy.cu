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

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;
using Single = cukit::Vec<T, 1>;
using Exchange = cukit::RowExchange<1>;

constexpr int kInFlight = 4;  // accesses that a thread issues before it uses the first

// Adds logits that are covered.
template <int N>
CUKIT_DEVICE void add(cukit::Mass& mass, const cukit::Vec<T, N>& logits) {
  float z[N];
  cukit::to_floats(z, logits);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += mass.term(z[j], cukit::kLog2E);
  mass.sum += sum;
}

// Logits become their gradients; `target` is the index of the target among them, if it is.
template <int N>
CUKIT_DEVICE void scale_softmax(cukit::Vec<T, N>& logits, const cukit::Mass& mass,
                                float scale_of_mass, int target, float scale) {
  float z[N];
  cukit::to_floats(z, logits);
#pragma unroll
  for (int j = 0; j < N; ++j) z[j] = mass.term(z[j], cukit::kLog2E) * scale_of_mass;
  if (static_cast<unsigned>(target) < N) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j == target) z[j] -= scale;
    }
  }
  cukit::from_floats(logits, z);
}

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
  const bool has_loose = slice.loose_column >= 0;
  Single loose[1];
  if (has_loose) loose[0][0] = logits[slice.base + slice.loose_column];
  Vector* const mine = cache + threadIdx.x;
  cukit::forwards<kInFlight>(slice.count, [&](const auto& part) {
    Vector batch[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (part.has(i)) {
        slice.read(batch[i], logits, part.first + i);
      } else {
        batch[i] = batch[0];
      }
    }
    masses[0].cover(cukit::largest(batch), cukit::kLog2E);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = part.first + i;
      if (!part.has(i)) break;
      if (k < CACHED) mine[k * THREADS] = batch[i];
      add(masses[0], batch[i]);
    }
  });
  if (has_loose) {
    masses[0].cover(cukit::largest(loose), cukit::kLog2E);
    add(masses[0], loose[0]);
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
    const int target_column = in_range ? static_cast<int>(target) : 0;
    cukit::backwards<kInFlight>(slice.count, [&](const auto& part) {
      Vector batch[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = part.first + i;
        if (!part.has(i)) break;
        if (k < CACHED) {
          batch[i] = mine[k * THREADS];
        } else {
          slice.read_again(batch[i], logits, k);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int k = part.first + i;
        if (!part.has(i)) break;
        scale_softmax(batch[i], mass, scale_of_mass, target_column - slice.column(k), scale);
        slice.write(grad, k, batch[i]);
      }
    });
    if (has_loose) {
      scale_softmax(loose[0], mass, scale_of_mass, target_column - slice.loose_column, scale);
      grad[slice.base + slice.loose_column] = loose[0][0];
    }
  }
}
