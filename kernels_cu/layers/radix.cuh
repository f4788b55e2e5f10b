// One digit of a key, for a stable least-significant-digit radix sort.
//
// A pass is two kernels: count_digits counts the digits of every chunk of keys, scatter_by_digit
// computes prefix sums of the counts and moves each key to its position. Equal digits keep their
// order.
//
// Macros: DIGIT_BITS 8..10; SHIFT lowest bit of the digit; CHUNK keys per block; THREADS 256.
#pragma once

#include "common/platform.cuh"

namespace cukit {

constexpr int kBins = 1 << DIGIT_BITS;

CUKIT_DEVICE int digit_of(unsigned int key) { return (key >> SHIFT) & (kBins - 1); }

// The key of a token id. All ids outside [0, num_keys) have the key num_keys.
template <typename Id>
CUKIT_DEVICE unsigned int id_key(Id id, int num_keys) {
  return id >= 0 && id < num_keys ? static_cast<unsigned int>(id) : num_keys;
}

}  // namespace cukit
