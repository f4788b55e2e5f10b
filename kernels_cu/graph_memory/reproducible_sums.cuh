// Sums that are bitwise independent of the order of their terms.
//
// All terms are rounded to fixed-point integers, whose scale follows from the largest magnitude and
// the number of terms; integer sums do not depend on the order. The largest term has 62 bits minus
// the bits of the number of terms, so the sum is more precise than a sum in float.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// N sums at once: pass every term to `observe`, then call `scale`, then pass every term to `add`,
// in any order.
template <int N>
struct ReproducibleSums {
  float largest[N];
  int shift[N];
  long long sums[N];

  CUKIT_DEVICE ReproducibleSums() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      largest[i] = 0.0f;
      sums[i] = 0;
    }
  }

  // A non-finite term makes `largest` infinite.
  CUKIT_DEVICE void observe(int i, float term) {
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
