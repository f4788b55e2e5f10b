// One token per sequence of a causal convolution. Updates the states (the last WIDTH - 1 inputs of
// each sequence) in place.
//
// Memory-bound. Mapping: grid (channels, 1, sequence), one thread per VEC channels. Macros: as
//   causal_conv.cu, without TOKENS. Minimum architecture: sm_80. Computes in float; deterministic.
// Reference: cukit/reference/convolution.py, causal_conv_step.
#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/convolution.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv_step(
    T* __restrict__ states,        // [batch, WIDTH - 1, channels]
    const T* __restrict__ x,       // [batch, channels]
    const T* __restrict__ weight,  // [channels, WIDTH]
    const T* __restrict__ bias,    // [channels] or null
    T* __restrict__ y,             // [batch, channels]
    const __grid_constant__ cukit::ConvParameters p) {
  const int channel = VEC * static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
  if (channel >= p.channels) return;
  const long long sequence = blockIdx.z;
  T* const state = states + sequence * (WIDTH - 1) * p.channels + channel;
  const long long at = sequence * p.channels + channel;

  const cukit::Taps taps(weight, bias, channel);
  cukit::Window window(x, state, 0, p.channels);
  cukit::Vec<T, VEC> now, out;
  cukit::load(now, x + at);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float value = cukit::to_float(now[j]);
    out[j] = cukit::from_float<T>(cukit::activation_t<T>::value(taps.sum(window, j, value)));
    window.push(j, value);
  }
  cukit::store(y + at, out);
#pragma unroll
  for (int k = 0; k < WIDTH - 1; ++k) {
    cukit::Vec<T, VEC> kept;
#pragma unroll
    for (int j = 0; j < VEC; ++j) kept[j] = cukit::from_float<T>(window.past[k][j]);
    cukit::store(state + static_cast<long long>(k) * p.channels, kept);
  }
}
