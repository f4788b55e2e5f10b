// Gradients of a causal depthwise convolution along time; z is recomputed.
//
//   dz = dy act'(z)      dx[u] = sum_k weight[k] dz[u + WIDTH - 1 - k]
//   dweight[k] = sum_t dz[t] x[t - (WIDTH - 1) + k]      dbias = sum_t dz[t]
//
// Memory-bound. Mapping: grid (channels, time, sequence); a thread iterates over TOKENS tokens of
//   VEC channels, and over the WIDTH - 1 tokens after them, because dx of the last tokens depends
//   on their dz. Each block of time writes its sums for weight and bias to a row of
//   `partial_weight` and `partial_bias`; common/column_sum.cu sums the rows.
// Macros: as causal_conv.cu. Minimum architecture: sm_80. Computes in float; deterministic.
// Reference: cukit/reference/convolution.py, causal_conv_backward.
#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/convolution.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv_backward(
    const T* __restrict__ grad_y,        // [batch, seq_len, channels]
    const T* __restrict__ x,             // [batch, seq_len, channels]
    const T* __restrict__ weight,        // [channels, WIDTH]
    const T* __restrict__ bias,          // [channels] or null
    const T* __restrict__ before,        // [batch, WIDTH - 1, channels] or null
    T* __restrict__ grad_x,              // [batch, seq_len, channels]
    T* __restrict__ grad_before,         // [batch, WIDTH - 1, channels] or null
    float* __restrict__ partial_weight,  // [batch * blocks of time, channels, WIDTH]
    float* __restrict__ partial_bias,    // [batch * blocks of time, channels]
    const __grid_constant__ cukit::ConvParameters p) {
  const int channel = VEC * static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
  if (channel >= p.channels) return;
  const int first = static_cast<int>(blockIdx.y) * TOKENS;
  const int end = min(first + TOKENS, p.seq_len);
  const long long sequence = blockIdx.z;
  const long long at = sequence * p.seq_len * p.channels + channel;
  const long long before_at = sequence * (WIDTH - 1) * p.channels + channel;
  x += at;
  grad_y += at;
  grad_x += at;
  if (before != nullptr) before += before_at;

  cukit::Taps taps(weight, bias, channel);
  cukit::Window window(x, before, first, p.channels);
  float recent_dz[WIDTH - 1][VEC] = {};  // of the previous tokens, oldest first
  float sum_weight[VEC][WIDTH] = {}, sum_bias[VEC] = {};
#pragma unroll 4
  for (int t = first; t < end + WIDTH - 1; ++t) {
    cukit::Vec<T, VEC> now{}, grad{}, out;
    const bool exists = t < p.seq_len;
    if (exists) {
      cukit::load(now, x + static_cast<long long>(t) * p.channels);
      cukit::load(grad, grad_y + static_cast<long long>(t) * p.channels);
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float value = exists ? cukit::to_float(now[j]) : 0.0f;
      float slope, dz = 0.0f;
      cukit::activation_t<T>::value_and_slope(taps.sum(window, j, value), &slope);
      if (exists) dz = cukit::to_float(grad[j]) * slope;
      if (t < end) {
        sum_bias[j] += dz;
#pragma unroll
        for (int k = 0; k < WIDTH - 1; ++k) sum_weight[j][k] = fmaf(dz, window.past[k][j], sum_weight[j][k]);
        sum_weight[j][WIDTH - 1] = fmaf(dz, value, sum_weight[j][WIDTH - 1]);
      }
      window.push(j, value);
      // dx of token t - (WIDTH - 1).
      float dx = taps.weight[0][j] * dz;
#pragma unroll
      for (int k = 1; k < WIDTH; ++k) dx = fmaf(taps.weight[k][j], recent_dz[WIDTH - 1 - k][j], dx);
      out[j] = cukit::from_float<T>(dx);
#pragma unroll
      for (int k = 0; k + 1 < WIDTH - 1; ++k) recent_dz[k][j] = recent_dz[k + 1][j];
      recent_dz[WIDTH - 2][j] = dz;
    }
    const int target = t - (WIDTH - 1);
    if (target >= first) {
      cukit::store(grad_x + static_cast<long long>(target) * p.channels, out);
    } else if (target < 0 && grad_before != nullptr) {
      cukit::store(grad_before + before_at + static_cast<long long>(target + WIDTH - 1) * p.channels, out);
    }
  }
  const long long row = sequence * gridDim.y + blockIdx.y;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    partial_bias[row * p.channels + channel + j] = sum_bias[j];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      partial_weight[(row * p.channels + channel + j) * WIDTH + k] = sum_weight[j][k];
    }
  }
}
