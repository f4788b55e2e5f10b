// The scores of a token's experts, held by a warp: lane l has experts l * PER_LANE to
// l * PER_LANE + PER_LANE - 1, so that of equal scores the lowest lane holds the lowest expert.
//
// Macros: DTYPE float32|float16|bfloat16, the logits; BINS, experts at most: a power of two, 32 or more;
//   VEC logits an access, a divisor of num_experts and of BINS / 32; SCORING Softmax|Sigmoid.
#pragma once

#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kPerLane = BINS / kWarpSize;
static_assert(kPerLane % VEC == 0, "whole accesses of a lane");

enum class Scoring { Softmax, Sigmoid };
constexpr Scoring kScoring = Scoring::SCORING;

// Reads a token's logits; -infinity where there is no expert. -0 becomes 0: the two are equal.
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

// What a row's softmax needs. All NaN where the row has a NaN or +infinity, or nothing but -infinity.
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

// A divisor: where all scores are zero, so is what is divided.
CUKIT_DEVICE float nonzero(float total) { return total == 0.0f ? 1.0f : total; }

}  // namespace cukit
