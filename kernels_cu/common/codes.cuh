// 8-bit codes as element types of tiles and products.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct Float8E4M3 {
  unsigned char code;
};
using Int8 = signed char;

// The accumulator type of an element type.
template <typename T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<Int8> {
  using Type = int;
};

}  // namespace cukit
