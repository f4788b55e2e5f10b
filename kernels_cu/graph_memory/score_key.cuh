// Sort keys of scores and their indices: a larger key has a higher score or, for equal scores, a
// lower index. Keys of scores are positive; 0 marks an empty entry.
#pragma once

#include "common/platform.cuh"

namespace cukit {

using Key = unsigned long long;

// NaN is treated as -infinity, -0 as 0.
CUKIT_DEVICE Key key_of_score(float score, unsigned index) {
  const float value = score != score ? -infinity() : score + 0.0f;
  const unsigned bits = __float_as_uint(value);
  const unsigned ordered = bits ^ (static_cast<int>(bits) < 0 ? 0xffffffffu : 0x80000000u);
  return static_cast<Key>(ordered) << 32 | (0xffffffffu - index);
}

CUKIT_DEVICE unsigned index_of_key(Key key) { return 0xffffffffu - static_cast<unsigned>(key); }

CUKIT_DEVICE float score_of_key(Key key) {
  const unsigned ordered = static_cast<unsigned>(key >> 32);
  return __uint_as_float(ordered ^ (static_cast<int>(ordered) < 0 ? 0x80000000u : 0xffffffffu));
}

}  // namespace cukit
