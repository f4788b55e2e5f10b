// Weights of tokens as integers, and the order of tokens.
//
// The weight of a logit d below the row's maximum is floor(2^kScale * 2^(-d * slope)), with
// slope = log2(e) / temperature and 24 significant bits. Sums of integers depend on no order: the same
// bits however a row is split, and thresholds and draws are exact. A token 2^-kScale as likely as the
// best weighs nothing.
//
// Tokens are ordered by logit, the largest first, and equal ones by token, the lowest first.
#pragma once

#include "common/platform.cuh"

namespace cukit {

using Weight = unsigned long long;

constexpr int kScale = 42;
constexpr int kVocabularyBits = 20;
static_assert(kScale + kVocabularyBits < 63, "the weights of a vocabulary add up to 63 bits at most");

constexpr int kMantissaBits = 24;
constexpr unsigned kOne = 0x3f800000u;  // of a float
constexpr int kOctaveShift = 23;

// 2^(-d * slope) as significand * 2^-(24 + octave), significand in (2^23, 2^24].
struct Scaled {
  unsigned below_one;  // distance of the float from 1 in units of its last place; orders weights

  CUKIT_DEVICE Scaled(float d, float slope) {
    const unsigned bits = __float_as_uint(exp2f(-d * slope));
    below_one = kOne - min(bits, kOne);
  }

  CUKIT_DEVICE int octave() const { return static_cast<int>(below_one >> kOctaveShift); }
  CUKIT_DEVICE unsigned significand() const {
    return (1u << kMantissaBits) - (below_one & ((1u << kOctaveShift) - 1));
  }

  // weight() is units() << shift(octave()).
  CUKIT_DEVICE static int shift(int octave) { return max(kScale - kMantissaBits - octave, 0); }
  CUKIT_DEVICE unsigned units() const {
    const int lost = min(max(octave() - (kScale - kMantissaBits), 0), 31);
    return significand() >> lost;
  }
  CUKIT_DEVICE Weight weight() const { return static_cast<Weight>(units()) << shift(octave()); }
};

// Smaller for larger logits; NaN comes first of all.
CUKIT_DEVICE unsigned descending_key(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0u : bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

CUKIT_DEVICE float logit_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

// A token by its place in the order: the logit above, the token below.
CUKIT_DEVICE unsigned long long rank_of(float x, int token) {
  return static_cast<unsigned long long>(descending_key(x)) << 32 | static_cast<unsigned>(token);
}

constexpr unsigned long long kNoRank = ~0ull;

// The smallest integer that is at least `fraction` of `total`, and at least 1.
CUKIT_DEVICE Weight part_of(Weight total, float fraction) {
  constexpr float kTwo63 = 9223372036854775808.0f;
  if (fraction >= 1.0f) return max(total, Weight{1});
  const Weight scaled = static_cast<Weight>(fmaxf(fraction, 0.0f) * kTwo63);
  const Weight high = __umul64hi(scaled, total), low = scaled * total;
  return max((high << 1 | low >> 63) + ((low << 1) != 0 ? 1 : 0), Weight{1});
}

}  // namespace cukit
