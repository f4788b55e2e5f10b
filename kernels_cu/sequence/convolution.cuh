// The weights and the previous inputs of a thread of the causal convolutions. Macros: WIDTH, VEC.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

// Inputs before the current token, oldest first.
struct Window {
  float past[WIDTH - 1][VEC];

  // x: [seq_len, channels], before: [WIDTH - 1, channels] or null, both at the thread's first channel.
  CUKIT_DEVICE Window(const element_t* x, const element_t* before, int first, int channels) {
#pragma unroll
    for (int k = 0; k < WIDTH - 1; ++k) {
      const int t = first - (WIDTH - 1) + k;
      Vec<element_t, VEC> read{};
      if (t >= 0) {
        load(read, x + static_cast<long long>(t) * channels);
      } else if (before != nullptr) {
        load(read, before + static_cast<long long>(t + WIDTH - 1) * channels);
      }
#pragma unroll
      for (int j = 0; j < VEC; ++j) past[k][j] = t >= 0 || before != nullptr ? to_float(read[j]) : 0.0f;
    }
  }

  CUKIT_DEVICE void push(int j, float value) {
#pragma unroll
    for (int k = 0; k + 1 < WIDTH - 1; ++k) past[k][j] = past[k + 1][j];
    past[WIDTH - 2][j] = value;
  }
};

struct Taps {
  float weight[WIDTH][VEC], bias[VEC];

  // weight: [channels, WIDTH], bias: [channels] or null.
  CUKIT_DEVICE Taps(const element_t* weights, const element_t* biases, int channel) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      bias[j] = biases == nullptr ? 0.0f : to_float(biases[channel + j]);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        weight[k][j] = to_float(weights[static_cast<long long>(channel + j) * WIDTH + k]);
      }
    }
  }

  CUKIT_DEVICE float sum(const Window& window, int j, float value) const {
    float sum = bias[j];
#pragma unroll
    for (int k = 0; k < WIDTH - 1; ++k) sum = fmaf(weight[k][j], window.past[k][j], sum);
    return fmaf(weight[WIDTH - 1][j], value, sum);
  }
};

}  // namespace cukit
