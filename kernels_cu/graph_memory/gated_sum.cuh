// Sums that do not depend on the order of their terms.
//
// All terms are rounded to integers of one scale, which follows from the largest of them and their
// number: integers add up to the same bits in any order. The scale leaves 62 bits less those of the
// number of terms, so that the sum is closer than one in float.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// N sums at once: first every term is shown to `see`, then, after `scale`, to `add`, in any order.
template <int N>
struct SumsInAnyOrder {
  float largest[N];
  int shift[N];
  long long sums[N];

  CUKIT_DEVICE SumsInAnyOrder() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      largest[i] = 0.0f;
      sums[i] = 0;
    }
  }

  // A term that is not finite makes `largest` infinite.
  CUKIT_DEVICE void see(int i, float term) {
    const float size = fabsf(term);
    largest[i] = size < infinity() ? fmaxf(largest[i], size) : infinity();
  }

  CUKIT_DEVICE void scale(int count) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int exponent = (__float_as_int(largest[i]) >> 23) - 126;  // largest < 2^exponent
      shift[i] = 62 - exponent - (32 - __clz(count));
    }
  }

  CUKIT_DEVICE void add(int i, float term) { sums[i] += __float2ll_rn(ldexpf(term, shift[i])); }

  CUKIT_DEVICE float result(int i) const {
    return largest[i] < infinity() ? ldexpf(__ll2float_rn(sums[i]), -shift[i])
                                   : __int_as_float(0x7fc00000);  // NaN
  }
};

}  // namespace cukit
