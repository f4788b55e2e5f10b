// The scores of a token's experts, held by a warp: lane l has experts l * kPerLane to
// l * kPerLane + kPerLane - 1, so that among equal scores the lowest lane holds the lowest expert.
//
// Macros: DTYPE float32|float16|bfloat16 of the logits; BINS, the maximum number of experts: a
//   power of two, at least 32; VEC logits per access, a divisor of num_experts and of BINS / 32;
//   SCORING Softmax|Sigmoid.
#pragma once

#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kPerLane = BINS / kWarpSize;
static_assert(kPerLane % VEC == 0, "a lane's logits are a multiple of an access");

enum class Scoring { Softmax, Sigmoid };
constexpr Scoring kScoring = Scoring::SCORING;

// A token's logits as they are loaded. They are converted separately, so that a warp does not wait
// for them before a barrier.
template <typename T>
struct LogitRow {
  Vec<T, VEC> chunks[kPerLane / VEC];

  CUKIT_DEVICE void load(const T* row, int num_experts) {
    const int first = threadIdx.x % kWarpSize * kPerLane;
#pragma unroll
    for (int j = 0; j < kPerLane; j += VEC) {
      if (first + j < num_experts) cukit::load(chunks[j / VEC], row + first + j);
    }
  }

  // The logits as floats, -infinity beyond the last expert. -0 becomes 0, so that both rank equal.
  CUKIT_DEVICE void convert(float (&logits)[kPerLane], int num_experts) const {
    const int first = threadIdx.x % kWarpSize * kPerLane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const bool exists = first + j / VEC * VEC < num_experts;
      logits[j] = exists ? to_float(chunks[j / VEC][j % VEC]) + 0.0f : -infinity();
    }
  }
};

constexpr unsigned kNotANumber = 1;

// An order-preserving unsigned key, above 0; NaN is the smallest.
CUKIT_DEVICE unsigned rank_key(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? kNotANumber : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

CUKIT_DEVICE float ranked_value(unsigned key) {
  if (key == kNotANumber) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The largest logit of a row, and the sum of exp(logit - largest). Probabilities are NaN if the row
// has a NaN or +infinity, or only -infinity.
struct RowSoftmax {
  float largest, sum;

  // with_sum false: `sum` is not computed, and only relative() is defined.
  CUKIT_DEVICE explicit RowSoftmax(const float (&logits)[kPerLane], bool with_sum = true) {
    largest = -infinity();
    sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) largest = fmaxf(largest, logits[j]);
    largest = ranked_value(__reduce_max_sync(kFullMask, rank_key(largest)));
    if (!with_sum) return;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sum += expf(logits[j] - largest);
    sum = warp_reduce<Sum>(sum);
  }

  // The probability divided by the largest probability.
  CUKIT_DEVICE float relative(float logit) const { return expf(logit - largest); }
  CUKIT_DEVICE float probability(float logit) const { return expf(logit - largest) / sum; }
  CUKIT_DEVICE float log_sum_exp() const { return largest + logf(sum); }
};

CUKIT_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// `total` as a divisor: it is 0 only if all scores are 0, and then so is the dividend.
CUKIT_DEVICE float nonzero(float total) { return total == 0.0f ? 1.0f : total; }

}  // namespace cukit
