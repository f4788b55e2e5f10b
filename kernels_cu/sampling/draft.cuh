// Acceptance of a drafted token, and the weights of the tokens that replace it if it is rejected.
// Paper: Leviathan et al., arXiv:2211.17192.
#pragma once

#include "common/platform.cuh"
#include "sampling/weight.cuh"

namespace cukit {

struct Draft {
  int token;           // -1: none, e.g. outside the vocabulary
  const float* probs;  // [vocab_size]: the draft's distribution; null: probability 1 for `token`

  // True with probability min(1, p / q), with p = weight / total and the draft's probability q.
  // bits: a uniform random integer of 64 bits.
  CUKIT_DEVICE bool accepted(Weight weight, Weight total, Weight bits) const {
    const double expected = probs == nullptr || token < 0 ? 1.0 : probs[token];
    const double uniform = static_cast<double>(bits >> 11) * 1.1102230246251565e-16;  // 2^-53
    return uniform * expected * static_cast<double>(total) < static_cast<double>(weight);
  }

  // The probability q of a token, for excess().
  CUKIT_DEVICE float probability(int column) const { return probs == nullptr ? 0.0f : probs[column]; }

  // The weight of a token after rejection: max(p - q, 0). share: 1 / total.
  CUKIT_DEVICE Weight excess(Weight weight, double share, int column, float q) const {
    if (weight == 0 || probs == nullptr) return column == token ? 0 : weight;
    const double more = static_cast<double>(weight) * share - q;
    return more > 0.0 ? static_cast<Weight>(fmin(more, 1.0) * static_cast<double>(Weight{1} << kScale)) : 0;
  }
};

}  // namespace cukit
