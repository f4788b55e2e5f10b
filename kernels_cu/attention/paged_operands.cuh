// Operands of paged attention's products, from the caches' own elements or from 8-bit codes.
//
// Codes stay codes in shared memory and become float16 in registers, exactly: half the bytes are read,
// and products are as those of float16. Two codes count as one 16-bit element for ldmatrix. Of keys a
// lane then holds columns 4t .. 4t + 3 of sixteen, where an operand wants 2t, 2t + 1, 2t + 8 and
// 2t + 9: the queries are stored with their columns in that order. Of values the lower codes of all
// pairs make one column tile, the upper ones the next, so that columns of the output interleave.
//
// Macros: those of paged_attention.cu.
#pragma once

#include "attention/paged_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/prmt.cuh"
#include "common/tile.cuh"

namespace cukit::paged {

using QOperand = LeftMK<HEAD_DIM>;
using KOperand = RightNK<kTileColumns>;
using VOperand = RightKN<kTileColumns>;

// Four codes as float16, two to a register.
CUKIT_DEVICE void unpack_codes(unsigned (&halves)[2], unsigned codes) {
#if CODE == 1
  unpack_e4m3(halves, codes);
#else
  // 1024 + (code + 128) is 0x6400 | (code + 128); 0x6480 is 1152.
  const unsigned biased = codes ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned word = permute_bytes(biased, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    unsigned base = 0x64806480u;
    const __half2 difference =
        __hsub2(*reinterpret_cast<__half2*>(&word), *reinterpret_cast<__half2*>(&base));
    halves[i] = *reinterpret_cast<const unsigned*>(&difference);
  }
#endif
}

// Sixteen columns of a query as two chunks of its tile.
CUKIT_DEVICE void order_queries(uint4 (&chunks)[2], const uint4 (&columns)[2]) {
  if constexpr (CODE == 0) {
    chunks[0] = columns[0];
    chunks[1] = columns[1];
  } else {
    const auto half = [](unsigned pair) {
      float values[2];
      unpack<T>(values, pair);
      return pack<__half>(values[0], values[1]);
    };
    const uint4 a = columns[0];
    const uint4 b = columns[1];
    chunks[0] = make_uint4(half(a.x), half(a.z), half(b.x), half(b.z));
    chunks[1] = make_uint4(half(a.y), half(a.w), half(b.y), half(b.w));
  }
}

// scores = Q K^T of sixteen keys.
CUKIT_DEVICE void multiply_keys(float (&scores)[M_TILES][2][4], const QOperand& q,
                                const KOperand& k) {
  clear(scores);
  if constexpr (CODE == 0) {
    warp_product<product_t, HEAD_DIM / 16>(
        scores, [&](unsigned(&r)[4], int m, int step) { q(r, 16 * m, 16 * step); },
        [&](unsigned(&r)[4], int n, int step) { k(r, 8 * n, 16 * step); });
  } else {
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 32; ++pair) {
      unsigned codes[4];  // keys 0-7 of two steps, keys 8-15 of both
      k(codes, 0, 16 * pair);
      unsigned halves[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) unpack_codes(halves[i], codes[i]);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          unsigned a[4];
          q(a, 16 * m, 16 * (2 * pair + step));
          mma_16x8x16<product_t>(scores[m][0], a, halves[step][0], halves[step][1]);
          mma_16x8x16<product_t>(scores[m][1], a, halves[2 + step][0], halves[2 + step][1]);
        }
    }
  }
}

// out += P V of sixteen keys.
CUKIT_DEVICE void multiply_values(float (&out)[M_TILES][kOTiles][4],
                                  const unsigned (&p)[M_TILES][1][4], const VOperand& v) {
  if constexpr (CODE == 0) {
    warp_product<product_t, 1>(
        out,
        [&](unsigned(&r)[4], int m, int) {
#pragma unroll
          for (int i = 0; i < 4; ++i) r[i] = p[m][0][i];
        },
        [&](unsigned(&r)[4], int n, int) { v(r, 0, 8 * n); });
  } else {
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 32; ++pair) {
      unsigned codes[4];  // keys 0-7 and 8-15 of sixteen columns, of the next sixteen
      v(codes, 0, 16 * pair);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        unsigned first[2];
        unsigned second[2];  // each: lower codes, upper codes
        unpack_codes(first, permute_bytes(codes[2 * side], 0, 0x3120));
        unpack_codes(second, permute_bytes(codes[2 * side + 1], 0, 0x3120));
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
#pragma unroll
          for (int m = 0; m < M_TILES; ++m) {
            mma_16x8x16<product_t>(out[m][4 * pair + 2 * side + upper], p[m][0], first[upper],
                                   second[upper]);
          }
      }
    }
  }
}

// A lane's outputs of one row, column tiles 2 n and 2 n + 1, to where they belong in its `row`.
CUKIT_DEVICE void store_columns(float* row, const float (&out)[kOTiles][4], int n, int half,
                                float factor) {
  const int t = threadIdx.x % kWarpSize % 4;
  const float* lower = &out[2 * n][2 * half];
  const float* upper = &out[2 * n + 1][2 * half];
  if constexpr (CODE == 0) {
    float* to = row + 16 * n + 2 * t;
    *reinterpret_cast<float2*>(to) = make_float2(lower[0] * factor, lower[1] * factor);
    *reinterpret_cast<float2*>(to + 8) = make_float2(upper[0] * factor, upper[1] * factor);
  } else {
    *reinterpret_cast<float4*>(row + 16 * n + 4 * t) = make_float4(
        lower[0] * factor, upper[0] * factor, lower[1] * factor, upper[1] * factor);
  }
}

}  // namespace cukit::paged
