// Operands of paged attention's products, from the caches' own elements or from 8-bit codes.
//
// Keys are the rows of S^T = K Q^T and columns of values those of O^T = V^T P^T, since tensor cores take
// sixteen rows and eight columns: a group of up to eight query heads then leaves no half of a product
// empty. The queries stay in registers, and P turns from a result into an operand by a transposition.
//
// Codes stay codes in shared memory and become float16 in registers: half the bytes are read, and
// products are as those of float16. A lane reads sixteen codes of a key at a time and takes four of
// them a step: the columns of the queries are ordered alike (query_place). Two codes of values count as
// one 16-bit element for ldmatrix; the lower codes of all pairs make one tile of output columns, the
// upper ones the next, so that columns of the output interleave.
//
// int8 codes become float16 by their bits: 0x6400 | (code + 128) is 1152 + code. Values have the 1152
// subtracted; what it adds to a score, 1152 times the sum of the query, is where its sum begins.
//
// Macros: those of paged_attention.cu.
#pragma once

#include "attention/paged_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/movmatrix.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/prmt.cuh"
#include "common/tile.cuh"

namespace cukit::paged {

using Scores = float[kKeyTiles][QUERY_TILES][4];
using Outputs = float[kDimSteps][QUERY_TILES][4];
using Probabilities = unsigned[kKeyTiles][QUERY_TILES][2];

using KOperand = LeftMK<kTileColumns>;
using VOperand = LeftKM<kTileColumns>;

constexpr unsigned kBias = 0x64806480u;       // 1152, twice
constexpr unsigned kMinusBias = 0xe480e480u;  // -1152, twice

// Codes 0 and 1 of four as float16, and codes 2 and 3; with Alternating 0 and 2, 1 and 3. int8 codes
// are 1152 larger.
template <bool Alternating>
CUKIT_DEVICE void spread_codes(unsigned (&halves)[2], unsigned codes) {
#if CODE == 1
  unpack_e4m3(halves, Alternating ? permute_bytes(codes, 0, 0x3120) : codes);
#else
  const unsigned raised = codes ^ 0x80808080u;
  halves[0] = permute_bytes(raised, 0x64646464u, Alternating ? 0x4240 : 0x4140);
  halves[1] = permute_bytes(raised, 0x64646464u, Alternating ? 0x4341 : 0x4342);
#endif
}

CUKIT_DEVICE unsigned without_bias(unsigned pair) {
  if constexpr (CODE != 2) return pair;
  unsigned base = kBias;
  const __half2 difference =
      __hsub2(*reinterpret_cast<__half2*>(&pair), *reinterpret_cast<__half2*>(&base));
  return *reinterpret_cast<const unsigned*>(&difference);
}

// The chunk of a key's codes that is read `load`-th by the lanes of number t: two neighbouring rows then
// use all banks.
constexpr bool kPairedChunks = kTileColumns % 64 == 0;
CUKIT_DEVICE int chunk_of_lane(int t, int load) {
  return kPairedChunks ? load / 2 * 8 + 2 * t + load % 2 : 4 * load + t;
}

// Where columns `column` and `column` + 1 of a query go in the tile: the word.
CUKIT_DEVICE int query_place(int row, int column) {
  int step, t, part;
  if constexpr (CODE == 0) {
    step = column / 16;
    t = column % 8 / 2;
    part = column % 16 / 8;
  } else {
    const int chunk = column / 16;
    t = kPairedChunks ? chunk % 8 / 2 : chunk % 4;
    step = 4 * (kPairedChunks ? chunk / 8 * 2 + chunk % 2 : chunk / 4) + column % 16 / 4;
    part = column % 4 / 2;
  }
  return ((row / 8 * kDimSteps + step) * kWarpSize + row % 8 * 4 + t) * 2 + part;
}

// Two columns of a query in the element type of the products.
CUKIT_DEVICE unsigned query_pair(unsigned pair) {
  if constexpr (CODE == 0) return pair;
  float values[2];
  unpack<T>(values, pair);
  return pack<__half>(values[0], values[1]);
}

// A lane's part of the queries, operand b: in registers where they have room for it.
class Queries {
 public:
  CUKIT_DEVICE explicit Queries(const unsigned char* tile)
      : tile_(reinterpret_cast<const uint2*>(tile) + threadIdx.x % kWarpSize) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) held_[i] = tile_[i * kWarpSize];
    }
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
      float sums[4] = {};
      if constexpr (CODE == 2) {
        const unsigned bias[4] = {kMinusBias, kMinusBias, kMinusBias, kMinusBias};
#pragma unroll
        for (int step = 0; step < kDimSteps; ++step) {
          const uint2 q = (*this)(n, step);
          mma_16x8x16<product_t>(sums, bias, q.x, q.y);
        }
      }
      start_[n][0] = sums[0];
      start_[n][1] = sums[1];
    }
  }

  // Of rows 8 n .. 8 n + 7.
  CUKIT_DEVICE uint2 operator()(int n, int step) const {
    const int i = n * kDimSteps + step;
    if constexpr (kHeld) {
      return held_[i];
    } else {
      return tile_[i * kWarpSize];
    }
  }

  // What sums of products begin with.
  CUKIT_DEVICE void begin(Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = start_[n][i % 2];
  }

 private:
  static constexpr int kPairs = QUERY_TILES * kDimSteps;
  static constexpr bool kHeld = kPairs <= 16;

  const uint2* tile_;
  uint2 held_[kHeld ? kPairs : 1];
  float start_[QUERY_TILES][2];
};

// scores = K Q^T of a warp's keys.
CUKIT_DEVICE void multiply_keys(Scores& scores, const Queries& queries, const unsigned char* keys) {
  queries.begin(scores);
  if constexpr (CODE == 0) {
    const KOperand operand(shared_address(keys), 0, 0);
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step)
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        unsigned a[4];
        operand(a, 16 * m, 16 * step);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          const uint2 q = queries(n, step);
          mma_16x8x16<product_t>(scores[m][n], a, q.x, q.y);
        }
      }
  } else {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int load = 0; load < HEAD_DIM / 64; ++load)
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        unsigned codes[2][4];  // of keys lane / 4 and lane / 4 + 8
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          const unsigned at = Swizzle<kTileColumns>::offset(row, chunk_of_lane(lane % 4, load));
          *reinterpret_cast<uint4*>(codes[half]) = *reinterpret_cast<const uint4*>(keys + at);
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          unsigned upper[2];
          unsigned lower[2];
          spread_codes<false>(upper, codes[0][word]);
          spread_codes<false>(lower, codes[1][word]);
          const unsigned a[4] = {upper[0], lower[0], upper[1], lower[1]};
#pragma unroll
          for (int n = 0; n < QUERY_TILES; ++n) {
            const uint2 q = queries(n, 4 * load + word);
            mma_16x8x16<product_t>(scores[m][n], a, q.x, q.y);
          }
        }
      }
  }
}

// out += V^T P^T of a warp's keys.
CUKIT_DEVICE void multiply_values(Outputs& out, const Probabilities& p, const unsigned char* values) {
  const VOperand operand(shared_address(values), 0, 0);
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
    for (int column = 0; column < kTileColumns; column += 16) {
      constexpr int kTiles = CODE == 0 ? 1 : 2;  // of output columns
      unsigned loaded[4];
      operand(loaded, 16 * m, column);
      unsigned a[kTiles][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (CODE == 0) {
          a[0][i] = loaded[i];
        } else {
          unsigned halves[2];
          spread_codes<true>(halves, loaded[i]);
          a[0][i] = without_bias(halves[0]);
          a[1][i] = without_bias(halves[1]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          mma_16x8x16<product_t>(out[column / 16 * kTiles + tile][n], a[tile], p[m][n][0],
                                 p[m][n][1]);
        }
    }
}

// A lane's outputs of eight rows, each to where it belongs among HEAD_DIM columns of its row.
// `pitch`: floats between rows; `factors`: of the lane's two rows.
CUKIT_DEVICE void store_columns(float* rows, int pitch, const Outputs& out, int n,
                                const float (&factors)[2]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* row = rows + (lane % 4 * 2 + i) * pitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int e = 2 * half + i;
      if constexpr (CODE == 0) {
#pragma unroll
        for (int c = 0; c < kDimSteps; ++c) {
          row[16 * c + 8 * half + lane / 4] = out[c][n][e] * factors[i];
        }
      } else {
#pragma unroll
        for (int c = 0; c < kDimSteps; c += 2) {
          *reinterpret_cast<float2*>(row + 16 * c + 2 * (8 * half + lane / 4)) =
              make_float2(out[c][n][e] * factors[i], out[c + 1][n][e] * factors[i]);
        }
      }
    }
  }
}

}  // namespace cukit::paged
