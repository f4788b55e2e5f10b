// The weighted sum of each token's rows.
//
//   x[t] = sum_s weights[t, s] * y[rows[t, s]] over the choices s with rows[t, s] >= 0
//
// Without WEIGHTED, the unweighted sum, which is the gradient of moe_permute.
// Mapping: block (token, slice) sums THREADS * VECS_PER_THREAD accesses of a row; each thread has
//   kAhead choices in flight. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; VEC elements per access; THREADS; VECS_PER_THREAD;
//   WEIGHTED 0|1. Minimum architecture: sm_80. Accumulates in float in the order of the choices:
//   deterministic.
// Reference: cukit/reference/moe.py, moe_unpermute.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"

namespace {

using T = cukit::element_t;
constexpr int kAhead = 8 / VECS_PER_THREAD;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) moe_unpermute(
    const T* __restrict__ y,            // [num_rows, hidden]
    const int* __restrict__ rows,       // [num_tokens, top_k]
    const float* __restrict__ weights,  // [num_tokens, top_k], with WEIGHTED
    T* __restrict__ x,                  // [num_tokens, hidden]
    const __grid_constant__ cukit::PermuteParameters p) {
  const int token = blockIdx.x;
  const int first = blockIdx.y * (THREADS * VECS_PER_THREAD) + threadIdx.x;
  const long long hidden = static_cast<long long>(p.vecs) * VEC;
  const long long choices = static_cast<long long>(token) * p.top_k;

  float sums[VECS_PER_THREAD][VEC] = {};
  for (int slot = 0; slot < p.top_k; slot += kAhead) {
    cukit::Vec<T, VEC> held[kAhead][VECS_PER_THREAD];
    int row[kAhead];
    float weight[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const bool exists = slot + a < p.top_k;
      row[a] = exists ? rows[choices + slot + a] : -1;
      weight[a] = WEIGHTED && exists ? weights[choices + slot + a] : 1.0f;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const int vec = first + i * THREADS;
        if (row[a] >= 0 && vec < p.vecs) {
          cukit::load(held[a][i], y + row[a] * hidden + vec * VEC);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (row[a] < 0) continue;
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        float values[VEC];
        cukit::to_floats(values, held[a][i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sums[i][j] = fmaf(weight[a], values[j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const int vec = first + i * THREADS;
    if (vec >= p.vecs) continue;
    cukit::Vec<T, VEC> rounded;
    cukit::from_floats(rounded, sums[i]);
    cukit::store(x + token * hidden + vec * VEC, rounded);
  }
}
