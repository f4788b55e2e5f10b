// Sums that do not depend on the order of their terms.
//
// All terms are rounded to integers of one scale, which follows from the largest of them and their
// number: integers add up to the same bits in any order. The scale leaves 62 bits less those of the
// number of terms, so that the sum is closer than one in float.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// The power of two that terms up to `largest` (finite, above 0) are multiplied by.
CUKIT_DEVICE int fixed_point_shift(float largest, int count) {
  const int exponent = (__float_as_int(largest) >> 23) - 126;  // largest < 2^exponent
  return 62 - exponent - (32 - __clz(count));
}

// Of `count` terms, term(i) each of them.
template <typename Term>
CUKIT_DEVICE float sum_in_any_order(int count, const Term& term) {
  if (count == 1) return term(0);
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    const float size = fabsf(term(i));
    finite = finite && size < infinity();
    largest = fmaxf(largest, size);
  }
  if (!finite) return __int_as_float(0x7fc00000);  // NaN
  if (largest == 0.0f) return 0.0f;
  const int shift = fixed_point_shift(largest, count);
  long long sum = 0;
  for (int i = 0; i < count; ++i) sum += __float2ll_rn(ldexpf(term(i), shift));
  return ldexpf(__ll2float_rn(sum), -shift);
}

}  // namespace cukit
