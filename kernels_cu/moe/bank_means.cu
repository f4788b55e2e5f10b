// Partial sums over the tokens of each sample: the first stage of their mean.
//
//   sums[b, part, c] = sum over the tokens t of the part of x[b, t, c]
//
// Mapping: grid (columns, parts, batch); VEC columns per thread. Shared memory: none.
// Macros: DTYPE float32|float16|bfloat16; VEC; THREADS. Minimum architecture: sm_80. Accumulates in
//   float in the order of the tokens: deterministic.
// Reference: cukit/reference/layer_bank.py, layer_bank.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) bank_means(
    const T* __restrict__ x,   // [batch, seq_len, dim]
    float* __restrict__ sums,  // [batch, parts, dim]
    const __grid_constant__ cukit::BankParameters p) {
  const int column = (blockIdx.x * THREADS + threadIdx.x) * VEC;
  if (column >= p.dim) return;
  const int share = (p.seq_len + p.parts - 1) / p.parts;
  const int begin = min(static_cast<int>(blockIdx.y) * share, p.seq_len);
  const int end = min(begin + share, p.seq_len);
  const T* from = x + static_cast<long long>(blockIdx.z) * p.seq_len * p.dim + column;
  float sum[VEC] = {};
#pragma unroll 8
  for (int t = begin; t < end; ++t) {
    cukit::Vec<T, VEC> part;
    float values[VEC];
    cukit::load(part, from + static_cast<long long>(t) * p.dim);
    cukit::to_floats(values, part);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] += values[i];
  }
  float* to = sums + (static_cast<long long>(blockIdx.z) * p.parts + blockIdx.y) * p.dim + column;
#pragma unroll
  for (int i = 0; i < VEC; ++i) to[i] = sum[i];
}
