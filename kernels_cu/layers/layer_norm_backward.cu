// Gradients of LayerNorm.
//
//   n      = (x - mean(x)) * rstd,  g = grad_out * weight
//   grad_x = rstd * (g - mean(g) - n * mean(g * n)) (+ grad_residual)
//   grad_weight = sum over rows of grad_out * n,  grad_bias = sum over rows of grad_out
//
// Mapping: a persistent grid; block b makes the passes b, b + gridDim.x, ... over the rows, which
//   are distributed over threads as in rows.cuh. A thread holds the same columns in every row and
//   accumulates their weight and bias gradients in registers. At its end a block writes its sums to
//   `partial`, which common/column_sum.cu reduces. Mean and rstd are recomputed, because x is
//   loaded anyway. If a row spans several warps, each warp computes moments about its own mean, and
//   the moments are combined to those about the row's mean (Chan, Golub and LeVeque): one barrier
//   per pass, no cancellation.
// Shared memory: static, 8 * ROWS * THREADS / 32 floats for long rows; for short rows a few floats
//   and kColumnScratch of rows.cuh. Dynamic: that of row_feed.cuh with PREFETCH.
// Macros: DTYPE float32|float16|bfloat16; THREADS, LANES, VEC (VEC * sizeof(DTYPE) <= 16, 16 with
//   PREFETCH), VECS_PER_THREAD, ROWS of rows.cuh; PREFETCH 0|1, FULL 0|1 of row_feed.cuh; RESIDUAL
//   0|1 (adds grad_residual to grad_x); BIAS 0|1; BLOCKS_PER_SM resident blocks, which limits the
//   registers per thread.
// Requires cols % VEC == 0 and cols <= LANES * VEC * VECS_PER_THREAD. Minimum architecture: sm_80.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/norms.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "layers/row_feed.cuh"
#include "layers/rows.cuh"

namespace {

using T = cukit::element_t;
using Vector = cukit::Vec<T, VEC>;

constexpr int kPartials = BIAS ? 2 : 1;
constexpr int kLanes = cukit::kCrossWarp ? cukit::kWarpSize : LANES;

// Moments of a row, or of the part of a row that a warp holds.
struct Moments {
  float mean;
  float squares;     // sum of (x - mean)^2
  float grads;       // sum of g
  float along_mean;  // sum of g (x - mean)
};

// Combines the moments of the warps. `held` is the number of columns that the warp with the index
// of this lane holds.
CUKIT_DEVICE void join_warps(Moments (&rows)[ROWS], float held, float inverse_cols,
                             Moments* scratch) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scratch[r * cukit::kWarps + threadIdx.x / cukit::kWarpSize] = rows[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    Moments part{0.0f, 0.0f, 0.0f, 0.0f};
    if (lane < cukit::kWarps) part = scratch[r * cukit::kWarps + lane];
    const float mean = cukit::warp_reduce<cukit::Sum>(held * part.mean) * inverse_cols;
    const float shift = part.mean - mean;
    rows[r].mean = mean;
    rows[r].squares = cukit::warp_reduce<cukit::Sum>(part.squares + held * shift * shift);
    rows[r].grads = cukit::warp_reduce<cukit::Sum>(part.grads);
    rows[r].along_mean = cukit::warp_reduce<cukit::Sum>(part.along_mean + part.grads * shift);
  }
}

// Number of columns that warp `warp` holds.
CUKIT_DEVICE int columns_of_warp(int warp, int num_vecs) {
  int vecs = 0;
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    vecs += max(0, min(cukit::kWarpSize, num_vecs - i * THREADS - warp * cukit::kWarpSize));
  }
  return vecs * VEC;
}

}  // namespace

extern "C" __global__ void
__launch_bounds__(THREADS, BLOCKS_PER_SM) layer_norm_backward(
    const T* __restrict__ grad_out,       // [rows, cols]
    const T* __restrict__ x,              // [rows, cols]
    const T* __restrict__ weight,         // [cols]
    const T* __restrict__ grad_residual,  // [rows, cols], RESIDUAL only
    T* __restrict__ grad_x,               // [rows, cols]
    float* __restrict__ partial,          // [gridDim.x, kPartials, cols]: of weight, of bias
    int rows, int given_cols, float eps) {
  __shared__ Moments scratch[2][ROWS * cukit::kScratch];
  __shared__ float column_scratch[cukit::kColumnScratch];
  CUKIT_DYNAMIC_SHARED(Vector, slots);
  const cukit::RowShare share;
  const int cols = cukit::row_length(given_cols);
  const int num_vecs = cols / VEC;
  const long long begin = static_cast<long long>(blockIdx.x) * cukit::kPassRows;
  const long long stride = static_cast<long long>(gridDim.x) * cukit::kPassRows;
  const cukit::PassWeights<T> weights(weight, num_vecs);
  cukit::RowFeed feed(x, grad_out, rows, cols, begin, stride, slots);
  // Number of columns in this warp's mean, and in that of the warp whose moments this lane loads in
  // join_warps.
  const int held = cukit::kCrossWarp ? columns_of_warp(threadIdx.x / cukit::kWarpSize, num_vecs) : cols;
  const float inverse_held = held > 0 ? 1.0f / held : 0.0f;
  const int peer = threadIdx.x % cukit::kWarpSize;
  const float held_by_peer = peer < cukit::kWarps ? columns_of_warp(peer, num_vecs) : 0;

  const float inverse_cols = 1.0f / cols;
  float grad_weight[VECS_PER_THREAD][VEC] = {};
  float grad_bias[VECS_PER_THREAD][VEC] = {};
  int turn = 0;
  for (long long first_row = begin; first_row < rows; first_row += stride, turn ^= 1) {
    Vector values[ROWS][VECS_PER_THREAD], grads[ROWS][VECS_PER_THREAD];
    feed.take(values, grads, first_row);
    Moments moments[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        if (!feed.holds(share.row(first_row, r), share.vec(i))) continue;
        float v[VEC];
        cukit::to_floats(v, values[r][i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum += v[j];
      }
      moments[r].mean = cukit::warp_reduce<cukit::Sum, kLanes>(sum) * inverse_held;
      moments[r].squares = moments[r].grads = moments[r].along_mean = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (share.vec(i) >= num_vecs) continue;
      float w[VEC];
      cukit::to_floats(w, weights(i));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (share.row(first_row, r) >= rows) continue;
        float v[VEC], g[VEC];
        cukit::to_floats(v, values[r][i]);
        cukit::to_floats(g, grads[r][i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float centred = v[j] - moments[r].mean;
          const float scaled = g[j] * w[j];
          moments[r].squares += centred * centred;
          moments[r].grads += scaled;
          moments[r].along_mean += scaled * centred;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      moments[r].squares = cukit::warp_reduce<cukit::Sum, kLanes>(moments[r].squares);
      moments[r].grads = cukit::warp_reduce<cukit::Sum, kLanes>(moments[r].grads);
      moments[r].along_mean = cukit::warp_reduce<cukit::Sum, kLanes>(moments[r].along_mean);
    }
    if constexpr (cukit::kCrossWarp) join_warps(moments, held_by_peer, inverse_cols, scratch[turn]);
    cukit::stay_packed(values);
    cukit::stay_packed(grads);

    float rstd[ROWS], constant[ROWS], along_n[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      rstd[r] = rsqrtf(moments[r].squares * inverse_cols + eps);
      constant[r] = rstd[r] * moments[r].grads * inverse_cols;
      along_n[r] = rstd[r] * rstd[r] * moments[r].along_mean * inverse_cols;
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const int vec = share.vec(i);
      if (vec >= num_vecs) continue;
      float w[VEC];
      cukit::to_floats(w, weights(i));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const long long row = share.row(first_row, r);
        if (row >= rows) continue;
        float v[VEC], g[VEC], add[VEC];
        cukit::to_floats(v, values[r][i]);
        cukit::to_floats(g, grads[r][i]);
        if constexpr (RESIDUAL) {
          Vector read;
          cukit::load<cukit::Cache::Kept>(read, grad_residual + row * cols + vec * VEC);
          cukit::to_floats(add, read);
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float normalised = (v[j] - moments[r].mean) * rstd[r];
          grad_weight[i][j] += g[j] * normalised;
          grad_bias[i][j] += g[j];
          g[j] = rstd[r] * (g[j] * w[j]) - constant[r] - normalised * along_n[r];
          if constexpr (RESIDUAL) g[j] += add[j];
        }
        Vector result;
        cukit::from_floats(result, g);
        cukit::store(grad_x + row * cols + vec * VEC, result);
      }
    }
  }

  float* own = partial + static_cast<long long>(blockIdx.x) * kPartials * cols;
  cukit::write_column_sums(grad_weight, own, cols, column_scratch);
  if constexpr (BIAS) cukit::write_column_sums(grad_bias, own + cols, cols, column_scratch);
}
