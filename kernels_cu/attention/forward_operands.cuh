// Operands of the Hopper forward: types of Q, K, V and of the probabilities P, their layouts in
// shared memory, and the two products.
//
//   SixteenBitOperands   all float16 or bfloat16, as TMA loads them
//   Float8Operands       all e4m3: both products at twice the rate. V is transposed first
//                        (float8_values.cuh), P is scaled by 2^kOffset and rounded
//   PreciseFloat8Operands  Q and K e4m3; V widened to float16, P rounded to float16
//
// Macros, 0 where a kernel does not define them: FLOAT8, PRECISE, PREPARES 0|1; PROMOTION_INTERVAL.
//
// Scores and outputs are wgmma accumulators (common/softmax/online_softmax.cuh).
#pragma once

#include "attention/float8_values.cuh"
#include "attention/parameters.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/softmax/online_softmax.cuh"

#ifndef FLOAT8
#define FLOAT8 0
#endif
#ifndef PRECISE
#define PRECISE 0
#endif
#ifndef PREPARES
#define PREPARES 0
#endif
#ifndef PROMOTION_INTERVAL
#define PROMOTION_INTERVAL 0
#endif

namespace cukit {

// Factors of FP8 inputs, one per batch and key head; null: 1. Not used for 16-bit inputs.
struct Descales {
#if FLOAT8
  const float* q;
  const float* k;
  const float* v;
  const Float8Settings& settings;

  // The factor of the products Q K^T.
  CUKIT_DEVICE float scores(int b, int kv_head) const {
    return factor(q, b * settings.q_batch + kv_head * settings.q_head) *
           factor(k, b * settings.k_batch + kv_head * settings.k_head);
  }

  // The factor of the outputs.
  CUKIT_DEVICE float values(int b, int kv_head) const {
    return factor(v, b * settings.v_batch + kv_head * settings.v_head);
  }

  CUKIT_DEVICE static float factor(const float* factors, int index) {
    return factors == nullptr ? 1.0f : factors[index];
  }
#else
  CUKIT_DEVICE float scores(int, int) const { return 1.0f; }
  CUKIT_DEVICE float values(int, int) const { return 1.0f; }
#endif
};

template <typename T, int TileN, int HeadDim, int ValueDim>
struct SixteenBitOperands {
  using QueryTile = SharedTile<T, kWarpgroupRows, HeadDim>;
  using KeyTile = SharedTile<T, TileN, HeadDim>;
  using ValueTile = SharedTile<T, TileN, ValueDim>;
  using Probabilities = unsigned[TileN / 16][4];
  static constexpr int kOffset = 0;
  static constexpr float kGrowth = kLazyGrowth;
  static constexpr bool kIntegerMaxima = TileN >= 128;

  CUKIT_DEVICE static void multiply_keys(float (&scores)[TileN / 2], unsigned long long q,
                                         unsigned long long k, bool accumulate) {
    wgmma<T, TileN>(scores, q, k, accumulate);
  }

  CUKIT_DEVICE static void multiply_values(float (&out)[ValueDim / 2], const unsigned (&p)[4],
                                           unsigned long long v) {
    wgmma<T, ValueDim, true>(out, p, v, true);
  }

  CUKIT_DEVICE static void pack(Probabilities& p, const float (&scores)[TileN / 2]) {
    pack_probabilities<T>(p, scores);
  }
};

// Q and K in e4m3.
template <int TileN, int HeadDim>
struct Float8Scores {
  using QueryTile = ByteTile<kWarpgroupRows, HeadDim>;
  using KeyTile = ByteTile<TileN, HeadDim>;
  // With 64 columns, integer comparisons of scores were up to 12 % slower.
  static constexpr bool kIntegerMaxima = HeadDim > 64;

  CUKIT_DEVICE static void multiply_keys(float (&scores)[TileN / 2], unsigned long long q,
                                         unsigned long long k, bool accumulate) {
    wgmma_e4m3<TileN>(scores, q, k, accumulate);
  }
};

template <int TileN, int HeadDim, int ValueDim>
struct Float8Operands : Float8Scores<TileN, HeadDim> {
  using ValueTile = SlabTile<TileN, ValueDim>;
  using Probabilities = unsigned[TileN / 32][4];
  // P is scaled by 2^kOffset before rounding, so that small probabilities use the exponent range of
  // e4m3: 2^8 is its largest power of two, 2^-9 its smallest positive number. A maximum is updated
  // by every larger score: the largest probability of a row is then a power of two, which e4m3
  // represents exactly. In short rows (CAUSAL) most tiles update a maximum, so every tile rescales
  // unconditionally, except with a VALUE_DIM of 256.
  static constexpr int kOffset = 8;
  static constexpr float kGrowth = CAUSAL && ValueDim < 256 ? -1.0f : 0.0f;

  CUKIT_DEVICE static void multiply_values(float (&out)[ValueDim / 2], const unsigned (&p)[4],
                                           unsigned long long v) {
    wgmma_e4m3<ValueDim>(out, p, v, true);
  }

  // Packs P in SlabTile's order of keys.
  CUKIT_DEVICE static void pack(Probabilities& p, const float (&scores)[TileN / 2]) {
#pragma unroll
    for (int step = 0; step < TileN / 32; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* of = &scores[16 * step + 8 * (i / 2) + 2 * (i % 2)];
        p[step][i] = pack_e4m3(of[0], of[1], of[4], of[5]);
      }
  }
};

template <int TileN, int HeadDim, int ValueDim>
struct PreciseFloat8Operands : Float8Scores<TileN, HeadDim> {
  using ValueTile = HalfTile<TileN, ValueDim>;
  using Probabilities = unsigned[TileN / 16][4];
  static constexpr int kOffset = 0;
  static constexpr float kGrowth = kLazyGrowth;

  CUKIT_DEVICE static void multiply_values(float (&out)[ValueDim / 2], const unsigned (&p)[4],
                                           unsigned long long v) {
    wgmma<__half, ValueDim, true>(out, p, v, true);
  }

  CUKIT_DEVICE static void pack(Probabilities& p, const float (&scores)[TileN / 2]) {
    pack_probabilities<__half>(p, scores);
  }
};

}  // namespace cukit
