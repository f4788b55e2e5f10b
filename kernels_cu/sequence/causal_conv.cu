// Causal depthwise convolution along time, with an activation.
//
//   z[t] = bias + sum_k weight[k] x[t - (WIDTH - 1) + k]      y = act(z)
//
// The inputs before the first token are `before`, or zeros.
//
// Memory-bound. Mapping: grid (channels, time, sequence); a thread iterates over TOKENS tokens of
//   VEC channels and keeps the last WIDTH - 1 inputs in registers. Shared memory: none.
// Macros: DTYPE float32|float16|bfloat16; ACTIVATION Silu|NoActivation; WIDTH 2|3|4; VEC a power of
//   two that divides channels, at most 16 bytes; TOKENS; THREADS. Minimum architecture: sm_80.
//   Computes in float; deterministic.
// Reference: cukit/reference/convolution.py, causal_conv.
#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/convolution.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv(
    const T* __restrict__ x,       // [batch, seq_len, channels]
    const T* __restrict__ weight,  // [channels, WIDTH]
    const T* __restrict__ bias,    // [channels] or null
    const T* __restrict__ before,  // [batch, WIDTH - 1, channels] or null
    T* __restrict__ y,             // [batch, seq_len, channels]
    const __grid_constant__ cukit::ConvParameters p) {
  const int channel = VEC * static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
  if (channel >= p.channels) return;
  const int first = static_cast<int>(blockIdx.y) * TOKENS;
  const int end = min(first + TOKENS, p.seq_len);
  const long long sequence = blockIdx.z;
  x += sequence * p.seq_len * p.channels + channel;
  y += sequence * p.seq_len * p.channels + channel;
  if (before != nullptr) before += sequence * (WIDTH - 1) * p.channels + channel;

  cukit::Taps taps(weight, bias, channel);
  cukit::Window window(x, before, first, p.channels);
#pragma unroll 4
  for (int t = first; t < end; ++t) {
    cukit::Vec<T, VEC> now, out;
    cukit::load(now, x + static_cast<long long>(t) * p.channels);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float value = cukit::to_float(now[j]);
      out[j] = cukit::from_float<T>(cukit::activation_t<T>::value(taps.sum(window, j, value)));
      window.push(j, value);
    }
    cukit::store(y + static_cast<long long>(t) * p.channels, out);
  }
}
