// Matrix products of a warp: 16 rows by n columns.
#pragma once

#include <cstring>

#include "block.h"
#include "numbers.h"

namespace cukit::emulator {

constexpr unsigned kRows = 16;
constexpr unsigned kMaxColumns = 256;
constexpr unsigned kMaxDepth = 32;

// a[row][k] and b[k][column], as floats.
struct Operands {
  float a[kRows][kMaxDepth];
  float b[kMaxDepth][kMaxColumns];
};

// Unpacks the four (or fewer) registers of operand A that a lane holds: register r has elements of
// row lane / 4 + 8 (r % 2), starting at column (lane % 4 + 4 (r / 2)) * per_register.
inline void unpack_a(Operands& operands, unsigned lane, const unsigned* registers, Number type,
                     unsigned k) {
  const unsigned per_register = 4 / bytes_of(type);
  for (unsigned r = 0; r < k / (2 * per_register); ++r) {
    const unsigned row = lane / 4 + 8 * (r % 2);
    const unsigned first = (lane % 4 + 4 * (r / 2)) * per_register;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&registers[r]);
    for (unsigned i = 0; i < per_register; ++i) {
      operands.a[row][first + i] = element(bytes, i, type);
    }
  }
}

// d += a b for one tile of eight columns. `d[lane]` points to the lane's four accumulators of the
// tile: floats or ints, in the hardware's register order.
template <typename T>
inline void multiply_tile(const Operands& operands, unsigned k, unsigned column, T* const* d) {
  T accumulators[kRows][8];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      accumulators[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2] = d[lane][i];
    }
  }
  for (unsigned row = 0; row < kRows; ++row) {
    for (unsigned i = 0; i < k; ++i) {
      const float left = operands.a[row][i];
      for (unsigned n = 0; n < 8; ++n) {
        accumulators[row][n] += static_cast<T>(left * operands.b[i][column + n]);
      }
    }
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      d[lane][i] = accumulators[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
    }
  }
}

}  // namespace cukit::emulator
