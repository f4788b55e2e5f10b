// Integer weights of tokens, and the order of tokens.
//
// The weight of a logit d below the row's maximum is floor(2^kScale * 2^(-d * slope)), with
// slope = log2(e) / temperature and 24 significant bits. Integer sums are independent of the order of
// summation, so results are bitwise equal for any split of a row, and thresholds and draws are exact.
// The weight of a token that is less than 2^-kScale times as likely as the best is 0.
//
// Tokens are ordered by descending logit, ties by ascending token id.
#pragma once

#include "common/platform.cuh"

namespace cukit {

using Weight = unsigned long long;

constexpr int kScale = 42;
constexpr int kVocabularyBits = 20;
static_assert(kScale + kVocabularyBits < 63, "the sum of all weights fits in 63 bits");

constexpr int kMantissaBits = 24;
constexpr unsigned kOne = 0x3f800000u;  // bits of 1.0f
constexpr int kOctaveShift = 23;

// 2^(-d * slope) as significand * 2^-(24 + octave), significand in (2^23, 2^24].
struct Scaled {
  unsigned below_one;  // kOne minus the bits of 2^(-d * slope); smaller for larger weights

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

// A sum of up to 512 weights, each split into high * 2^20 + low. share: 2^(-d * slope) as computed
// by Scaled.
class WeightSum {
 public:
  CUKIT_DEVICE void add(float share) {
    const float upper = __fadd_rz(share, kHigh);
    const float rest = share - (upper - kHigh);
    high_ += __float_as_uint(upper) - kHighBits;
    low_ += __float_as_uint(__fadd_rz(rest, kLow)) - kLowBits;
  }
  CUKIT_DEVICE Weight value() const { return (static_cast<Weight>(high_) << 20) + low_; }

 private:
  static_assert(kScale == 42, "truncated sums have units of 2^-22 with kHigh, of 2^-42 with kLow");
  static constexpr float kHigh = 3.0f, kLow = 1.9073486328125e-6f;
  static constexpr unsigned kHighBits = 0x40400000u, kLowBits = 0x36000000u;
  unsigned high_ = 0, low_ = 0;
};

// Smaller for larger logits; NaN has the smallest key.
CUKIT_DEVICE unsigned descending_key(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0u : bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

CUKIT_DEVICE float logit_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

// Sort key of a token: logit in the high word, token id in the low word.
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
