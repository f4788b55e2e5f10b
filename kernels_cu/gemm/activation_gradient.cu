// The gradient through a linear layer's activation, and the bias's gradient.
//
//   PARTS 1   grad = grad_out f'(z)
//   PARTS 2   z = [gate | up]: grad = [grad_out up f'(gate) | grad_out f(gate)]
//   SUMS 1    partial[s, c] = sum of grad[r, c] over the rows r of strip s; common/column_sum.cu
//             adds the strips
//
// Mapping: block (x, y) computes 32 * VEC columns of the rows of strip y, one row per warp at a
//   time, VEC columns per lane. One pass over memory.
// Shared memory: THREADS * VEC floats with SUMS, static.
// Macros: DTYPE float16|bfloat16; THREADS a multiple of 32; VEC elements per access, a divisor of
//   `columns`; PARTS 1|2; ACTIVATION NoActivation|Relu|GeluErf|GeluTanh|Silu (with NoActivation
//   only the sums are written); SUMS 0|1, 0 with PARTS 2.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::kWarpSize;

template <typename Activation>
constexpr bool kIsPlain = false;
template <typename U>
constexpr bool kIsPlain<cukit::NoActivation<U>> = true;

static_assert(PARTS == 1 || !SUMS, "a gated layer has no bias");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) activation_gradient(
    const T* __restrict__ grad_out,  // [rows, columns]
    const T* __restrict__ z,         // [rows, PARTS * columns]; null with NoActivation
    T* __restrict__ grad,            // [rows, PARTS * columns]; null with NoActivation
    float* __restrict__ partial,     // [strips, columns]; null without SUMS
    const cukit::GradientParameters p) {
  using Activation = cukit::ACTIVATION<T>;
  constexpr int kWarps = THREADS / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int column = (blockIdx.x * kWarpSize + lane) * VEC;
  const int first = blockIdx.y * p.strip_rows;
  const int end = min(first + p.strip_rows, p.rows);

  float sums[VEC] = {};
  if (column < p.columns) {
#pragma unroll 4
    for (int row = first + warp; row < end; row += kWarps) {
      const long long at = static_cast<long long>(row) * p.columns + column;
      const long long at_z = PARTS * at - (PARTS - 1) * column;
      cukit::Vec<T, VEC> g, gate, up;
      cukit::load(g, grad_out + at);
      if constexpr (!kIsPlain<Activation>) cukit::load(gate, z + at_z);
      if constexpr (PARTS == 2) cukit::load(up, z + at_z + p.columns);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        if constexpr (!kIsPlain<Activation>) {
          float slope;
          const float outer = cukit::to_float(g[i]);
          const float value = Activation::value_and_slope(cukit::to_float(gate[i]), &slope);
          if constexpr (PARTS == 2) {
            g[i] = cukit::from_float<T>(outer * cukit::to_float(up[i]) * slope);
            up[i] = cukit::from_float<T>(outer * value);
          } else {
            g[i] = cukit::from_float<T>(outer * slope);
          }
        }
        sums[i] += cukit::to_float(g[i]);
      }
      if constexpr (!kIsPlain<Activation>) cukit::store(grad + at_z, g);
      if constexpr (PARTS == 2) cukit::store(grad + at_z + p.columns, up);
    }
  }
  if constexpr (SUMS) {
    __shared__ float shared[kWarps][kWarpSize * VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) shared[warp][i * kWarpSize + lane] = sums[i];
    __syncthreads();
    for (int at = threadIdx.x; at < kWarpSize * VEC; at += THREADS) {
      const int own = (blockIdx.x * kWarpSize + at % kWarpSize) * VEC + at / kWarpSize;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += shared[w][at];
      if (own < p.columns) partial[static_cast<long long>(blockIdx.y) * p.columns + own] = total;
    }
  }
}
