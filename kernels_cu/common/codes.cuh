// Codes of eight bits, as element types of tiles and products.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct Float8E4M3 {
  unsigned char code;
};
using Int8 = signed char;

// What products of a type are summed up in.
template <typename T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<Int8> {
  using Type = int;
};

}  // namespace cukit
