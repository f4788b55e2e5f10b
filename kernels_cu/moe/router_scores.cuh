// The scores of a token's experts, held by a warp: lane l has experts l * kPerLane to
// l * kPerLane + kPerLane - 1, so that among equal scores the lowest lane holds the lowest expert.
//
// Macros: DTYPE float32|float16|bfloat16 of the logits; BINS, the most experts: a power of two, at
//   least 32; VEC logits per access, a divisor of num_experts and of BINS / 32; SCORING
//   Softmax|Sigmoid.
#pragma once

#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kPerLane = BINS / kWarpSize;
static_assert(kPerLane % VEC == 0, "a lane's logits are a multiple of an access");

enum class Scoring { Softmax, Sigmoid };
constexpr Scoring kScoring = Scoring::SCORING;

// Loads a token's logits, with -infinity beyond the last expert. -0 becomes 0, so that both rank
// equal.
template <typename T>
CUKIT_DEVICE void load_logits(float (&logits)[kPerLane], const T* row, int num_experts) {
  const int first = threadIdx.x % kWarpSize * kPerLane;
#pragma unroll
  for (int j = 0; j < kPerLane; j += VEC) {
    Vec<T, VEC> chunk;
    const bool exists = first + j < num_experts;
    if (exists) load(chunk, row + first + j);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      logits[j + i] = exists ? to_float(chunk[i]) + 0.0f : -infinity();
    }
  }
}

// Maximum and sum of a row's softmax. Probabilities are NaN if the row has a NaN or +infinity, or
// only -infinity.
struct RowSoftmax {
  float largest, sum;

  CUKIT_DEVICE explicit RowSoftmax(const float (&logits)[kPerLane]) {
    largest = -infinity();
    sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) largest = fmaxf(largest, logits[j]);
    largest = warp_reduce<Max>(largest);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sum += expf(logits[j] - largest);
    sum = warp_reduce<Sum>(sum);
  }

  CUKIT_DEVICE float probability(float logit) const { return expf(logit - largest) / sum; }
  CUKIT_DEVICE float log_sum_exp() const { return largest + logf(sum); }
};

CUKIT_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// `total` as a divisor: it is 0 only if all scores are 0, and then so is the dividend.
CUKIT_DEVICE float nonzero(float total) { return total == 0.0f ? 1.0f : total; }

}  // namespace cukit
