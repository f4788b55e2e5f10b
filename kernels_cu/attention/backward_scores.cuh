// Scores of the Hopper backward, keys as rows and queries as columns, and stores of dK and dV.
//
// Elements are in the layout of wgmma accumulators: element 4 n + 2 half + i of a lane is row
// lane / 4 + 8 half of its warp's sixteen, column 8 n + 2 (lane % 4) + i.
//
// Macros: DTYPE, HEAD_DIM, COLUMNS, VALUE_COLUMNS, TILE_M, TILE_N, SPLIT, those of
//   score_options.cuh.
#pragma once

#include "attention/backward_options.cuh"
#include "attention/backward_pipelines.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/quad.cuh"
#include "common/types.cuh"

namespace cukit::backward {

#if SPLIT
using Gradient = float;
#else
using Gradient = T;
#endif

// Issues scores = K Q^T or V dO^T over `Columns` columns: keys as rows, queries as columns.
template <int Columns>
CUKIT_DEVICE void multiply_keys(Scores& scores, unsigned long long keys,
                                unsigned long long queries) {
#pragma unroll
  for (int step = 0; step < Columns / 16; ++step) {
    wgmma<T, TILE_M>(scores, keys + KeyTile::k_step(step), queries + QueryTile::k_step(step),
                     step > 0);
  }
  wgmma_commit();
}

// Issues dV += P^T dO or dK += dS^T Q.
template <int N>
CUKIT_DEVICE void multiply_queries(float (&gradient)[N], const Packed& scores,
                                   unsigned long long queries) {
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    wgmma<T, 2 * N, true>(gradient, scores[step], queries + QueryTile::mn_step(step), true);
  }
  wgmma_commit();
}

// Sets scores to -infinity where the key is not below `keys`, or is masked by CAUSAL or WINDOW.
// `opposite`: the query on the diagonal of the lane's first row, key - causal offset, counted from
// the tile's first query.
CUKIT_DEVICE void mask(Scores& scores, int key, int keys, int opposite,
                       const ScoreSettings& settings) {
  const int lane_column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = opposite + 8 * half - lane_column;
    int first = CAUSAL ? own : WINDOW ? own - settings.window_right : -1;
    const int last = own + settings.window_left;
    if (key + 8 * half >= keys) first = TILE_M;
#pragma unroll
    for (int n = 0; n < TILE_M / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < first || (WINDOW && 8 * n + i > last)) {
          scores[4 * n + 2 * half + i] = -infinity();
        }
      }
  }
}

// P = exp2(score - lse), packed as operand a, from the result of prepare().
CUKIT_DEVICE void exponentiate(Scores& scores, Packed& packed, const float* lse,
                               const ScoreKeys& slopes, const TileScores& tile, float scale_log2) {
  const float ahead = first_ahead(tile);
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    unsigned derivatives[4];
#pragma unroll
    for (int n = 2 * step; n < 2 * step + 2; ++n) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = &scores[4 * n + 2 * half];
        if constexpr (!kScoresModified) {
          pair[0] = exp2f(fmaf(pair[0], scale_log2, -row_lse.x));
          pair[1] = exp2f(fmaf(pair[1], scale_log2, -row_lse.y));
        } else {
          if constexpr (!BIAS) {
            const float place = ahead + static_cast<float>(8 * n - 8 * half);
            float slope[2];
            pair[0] = modified(pair[0], place, tile, scale_log2, slope[0]);
            pair[1] = modified(pair[1], place + 1.0f, tile, scale_log2, slope[1]);
            if constexpr (SOFTCAP) derivatives[n % 2 * 2 + half] = pack<T>(slope[0], slope[1]);
          }
          pair[0] = exp2f(pair[0] - row_lse.x);
          pair[1] = exp2f(pair[1] - row_lse.y);
        }
        packed[step][n % 2 * 2 + half] = pack<T>(pair[0], pair[1]);
      }
    }
    if constexpr (SOFTCAP && !BIAS) slopes.store(step, derivatives);
  }
}

// dS = P * (dP - delta) * derivative of the softcap, in place of dP.
CUKIT_DEVICE void differentiate(Scores& dp, const Packed& p, const float* delta,
                                const ScoreKeys& slopes) {
  if constexpr (SOFTCAP) __syncwarp();  // the derivatives are in shared memory
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    unsigned derivatives[4];
    if constexpr (SOFTCAP) slopes.load(derivatives, step);
#pragma unroll
    for (int n = 2 * step; n < 2 * step + 2; ++n) {
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const own = &dp[4 * n + 2 * half];
        const int of_step = n % 2 * 2 + half;
        float pair[2];
        unpack<T>(pair, p[step][of_step]);
        if constexpr (SOFTCAP) {
          float slope[2];
          unpack<T>(slope, derivatives[of_step]);
          pair[0] *= slope[0], pair[1] *= slope[1];
        }
        own[0] = pair[0] * (own[0] - row_delta.x);
        own[1] = pair[1] * (own[1] - row_delta.y);
      }
    }
  }
}

#if DISTILL
// P = exp2(score - lse), in place, unrounded.
CUKIT_DEVICE void exponentiate_unrounded(Scores& scores, const float* lse, float scale_log2) {
#pragma unroll
  for (int n = 0; n < TILE_M / 8; ++n) {
    const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* pair = &scores[4 * n + 2 * half];
      pair[0] = exp2f(fmaf(pair[0], scale_log2, -row_lse.x));
      pair[1] = exp2f(fmaf(pair[1], scale_log2, -row_lse.y));
    }
  }
}

// dS = P - the teacher's P, in place of the teacher's products.
CUKIT_DEVICE void subtract(Scores& teacher, const Scores& p, const float* lse, float scale_log2) {
#pragma unroll
  for (int n = 0; n < TILE_M / 8; ++n) {
    const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * n + 2 * half;
      teacher[at] = p[at] - exp2f(fmaf(teacher[at], scale_log2, -row_lse.x));
      teacher[at + 1] = p[at + 1] - exp2f(fmaf(teacher[at + 1], scale_log2, -row_lse.y));
    }
  }
}
#endif

// Packs scores as operand a.
CUKIT_DEVICE void pack_scores(Packed& packed, const Scores& scores) {
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[step][i] = pack<T>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
    }
}

// Masks a tile's scores by length, CAUSAL and WINDOW. `key`: the lane's first key, counted from the
// block's first key.
CUKIT_DEVICE void mask_tile(Scores& scores, const ConsumerWork& work, int key, int first_query) {
  const int right = CAUSAL ? 0 : work.settings.window_right;
  const int left = work.settings.window_left;
  if (work.keys_left < TILE_N ||
      ((CAUSAL || WINDOW) &&
       work.first_key + TILE_N - 1 > first_query + work.causal_offset + right) ||
      (WINDOW && work.first_key < first_query + TILE_M - 1 + work.causal_offset - left)) {
    mask(scores, key, work.keys_left,
         work.first_key + key - work.causal_offset - first_query, work.settings);
  }
}

// Turns the products of a tile into the input of exponentiate(): masks, and bias.
CUKIT_DEVICE void prepare(Scores& scores, const ScoreKeys& slopes, const ConsumerWork& work,
                          const TileScores& tile, Prefetched& prefetched, int key,
                          float scale_log2) {
  if constexpr (MASK) apply_mask(scores, tile, prefetched);
  mask_tile(scores, work, key, tile.first_query);
  if constexpr (BIAS) add_bias(scores, slopes, tile, prefetched, scale_log2);
}

// Destination of a block's dK or dV: rows of `columns`, multiplied by `factor`.
struct Target {
  Gradient* first;
  long long row_stride;
  int columns;
  float factor;
};

struct Results {
  Target k, v;
  int keys_left;
#if ROPE
  const float *cosines, *sines;  // of the block's first key
#endif
};

#if ROPE
// Rotates dK back by the angle of each key's position. N = HEAD_DIM / 2: the pair of a column is N
// columns away, in the same thread. dK is multiplied by its factor and rounded before the rotation,
// as it is if a separate kernel rotates it.
template <int N>
CUKIT_DEVICE void rotate_back(float (&gradient)[N], Results& results, int first_row) {
  const int lane_column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    if (row >= results.keys_left) continue;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const int column = 8 * n + lane_column;
      const float2 cosine = *reinterpret_cast<const float2*>(results.cosines + row * N + column);
      const float2 sine = *reinterpret_cast<const float2*>(results.sines + row * N + column);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& first = gradient[4 * n + 2 * half + i];
        float& second = gradient[4 * (n + N / 8) + 2 * half + i];
        const float a = to_float(from_float<T>(first * results.k.factor));
        const float b = to_float(from_float<T>(second * results.k.factor));
        const float c = i == 0 ? cosine.x : cosine.y, s = i == 0 ? sine.x : sine.y;
        first = a * c + b * s;
        second = b * c - a * s;
      }
    }
  }
  results.k.factor = 1.0f;
}
#endif

// Stores the gradients of a warp's sixteen keys, 2 N columns from `first_column` on; `first_row` is
// the lane's first. Padded: the target may have fewer columns.
template <bool Padded, int N>
CUKIT_DEVICE void store(const Target& target, const float (&gradient)[N], int keys_left,
                        int first_row, int first_column) {
  const int quad_lane = threadIdx.x % 4;
  const float factor = target.factor;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    const bool exists = row < keys_left;
    Gradient* const out = target.first + row * target.row_stride;
#if SPLIT
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      const float* pair = &gradient[4 * n + 2 * half];
      const int column = first_column + 8 * n + 2 * quad_lane;
      if (exists && (!Padded || column < target.columns)) {
        *reinterpret_cast<float2*>(out + column) = make_float2(pair[0] * factor, pair[1] * factor);
      }
    }
#else
#pragma unroll
    for (int four = 0; four < N / 16; ++four) {
      unsigned chunk[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* pair = &gradient[4 * (4 * four + n) + 2 * half];
        chunk[n] = pack<T>(pair[0] * factor, pair[1] * factor);
      }
      transpose_quad(chunk);
      const int column = first_column + 32 * four + 8 * quad_lane;
      if (exists && (!Padded || column < target.columns)) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
#endif
  }
}

}  // namespace cukit::backward
