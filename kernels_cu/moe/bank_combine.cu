// Adds to each sample the outputs of its chosen layers.
//
//   y[b, t] = x[b, t] + sum_s weights[b, s] * f(hidden[rows[b, s], t]) + shift[b] / seq_len
//   f: the activation.
//
// Also computes the gradient of the layer bank's input: x is then the gradient of the bank's
// output, hidden holds the gradients of the chosen layers' inputs, f is the identity, the weights
// are 1, and shift is the gradient of the mean token.
// Mapping: grid (blocks of THREADS vectors of a sample, batch); one vector of VEC elements per
//   thread. Shared memory: none.
// Macros: DTYPE float32|float16|bfloat16; VEC; ACTIVATION Silu|GeluErf|GeluTanh|Relu|NoActivation;
//   WEIGHTED 0|1; SHIFTED 0|1; THREADS. Minimum architecture: sm_80. Accumulates in float in the
//   order of the choices: deterministic.
// Reference: cukit/reference/layer_bank.py, layer_bank.
#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"

namespace {

using T = cukit::element_t;
constexpr int kAhead = 4;  // layers whose outputs are loaded before the first is added

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) bank_combine(
    const T* __restrict__ x,            // [batch, seq_len, dim]
    const T* __restrict__ hidden,       // [batch * top_k, seq_len, dim]
    const int* __restrict__ rows,       // [batch, top_k]
    const float* __restrict__ weights,  // [batch, top_k], WEIGHTED 1
    const float* __restrict__ shift,    // [batch, dim], SHIFTED 1
    T* __restrict__ y,                  // [batch, seq_len, dim]
    const __grid_constant__ cukit::BankParameters p) {
  const long long size = static_cast<long long>(p.seq_len) * p.dim;  // elements of a sample
  const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  const long long sample = blockIdx.y;
  if (at >= size) return;
  cukit::Vec<T, VEC> own;
  float sum[VEC];
  cukit::load(own, x + sample * size + at);
  cukit::to_floats(sum, own);
  for (int slot = 0; slot < p.top_k; slot += kAhead) {
    cukit::Vec<T, VEC> held[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (slot + a < p.top_k) {
        cukit::load(held[a], hidden + rows[sample * p.top_k + slot + a] * size + at);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (slot + a >= p.top_k) break;
      const float weight = WEIGHTED ? weights[sample * p.top_k + slot + a] : 1.0f;
      float values[VEC];
      cukit::to_floats(values, held[a]);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        sum[i] = fmaf(weight, cukit::activation_t<T>::value(values[i]), sum[i]);
      }
    }
  }
  if constexpr (SHIFTED) {
    const int column = static_cast<int>(at % p.dim);
    const float scale = 1.0f / static_cast<float>(p.seq_len);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] = fmaf(scale, shift[sample * p.dim + column + i], sum[i]);
  }
  cukit::Vec<T, VEC> rounded;
  cukit::from_floats(rounded, sum);
  cukit::store(y + sample * size + at, rounded);
}
