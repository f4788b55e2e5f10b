// Score options of the Hopper backward, whose scores have keys as rows (backward_scores.cuh).
//
// The rows of a bias or mask are queries, in which a warp's sixteen keys are contiguous: a lane
// loads keys of one query, and the warp transposes them (movmatrix, ballots).
//
// Macros: TILE_M, TILE_N, those of score_options.cuh.
#pragma once

#include "attention/backward_pipelines.cuh"
#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/movmatrix.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/scores/fragment_matrix.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace cukit::backward {

constexpr int kWarpKeys = 16;

using Scores = float[TILE_M / 2];
using Packed = unsigned[TILE_M / 16][4];  // scores as operand a, sixteen queries per step

// A head's options, and the first query and key of a warp's scores in the sequence.
struct TileScores {
  HeadScores head;
  const ScoreSettings& settings;
  int first_query, first_key;

  // `head`: index in the work item's group; `warp_row`: the warp's first key in the block's tile.
  CUKIT_DEVICE TileScores(const ConsumerWork& work, int head, int tile, int warp_row)
      : head(work.arrays, work.settings, work.batch, work.first_head + head,
             {0, 0, work.first_key + work.keys_left - work.causal_offset,
              work.first_key + work.keys_left}),
        settings(work.settings),
        first_query(tile * TILE_M),
        first_key(work.first_key + warp_row) {}

  // All keys of the warp exist.
  CUKIT_DEVICE bool has_all_keys() const { return first_key + kWarpKeys <= head.seq_kv; }
};

// The score of a product without bias, in log2 units; -infinity stays. Sets `slope` to its
// derivative with respect to the scaled product. `ahead`: the ALiBi distance, query + causal offset
// - key.
CUKIT_DEVICE float modified(float product, float ahead, const TileScores& tile, float scale_log2,
                            float& slope) {
  slope = 1.0f;
  float value = product * scale_log2;
  if constexpr (SOFTCAP) {
    const float t =
        1.0f - __fdividef(2.0f, 1.0f + exp2f(product * tile.settings.cap_inner));
    value = product == -infinity() ? product : tile.settings.cap_outer * t;
    slope = 1.0f - t * t;
  }
  // CAUSAL: a negative distance is masked anyway.
  if constexpr (ALIBI) value = fmaf(-tile.head.slope_log2, CAUSAL ? ahead : fabsf(ahead), value);
  return value;
}

// The ALiBi distance of the lane's first score.
CUKIT_DEVICE float first_ahead(const TileScores& tile) {
  const int lane = threadIdx.x % kWarpSize;
  return static_cast<float>(tile.first_query + lane % 4 * 2 + tile.head.causal_offset -
                            tile.first_key - lane / 4);
}

// A warp's sixteen keys of a tile of P or dS in shared memory, sixteen queries per step. SOFTCAP:
// the derivatives of the scores are stored in place of dS until it is computed, to save registers.
class ScoreKeys {
 public:
  // `first_key`: the warp's first, in the block's tile.
  CUKIT_DEVICE ScoreKeys(const unsigned char* tile, int first_key)
      : tile_(shared_address(tile)), first_key_(first_key) {}

  CUKIT_DEVICE void store(int step, const unsigned (&scores)[4]) const {
    if constexpr (kTransposed) {
      stmatrix_x4_trans(at(step), scores);
    } else {
      stmatrix_x4(at(step), scores);
    }
  }

  CUKIT_DEVICE void store(const Packed& scores) const {
#pragma unroll
    for (int step = 0; step < TILE_M / 16; ++step) store(step, scores[step]);
  }

  CUKIT_DEVICE void load(unsigned (&scores)[4], int step) const {
    if constexpr (kTransposed) {
      ldmatrix_x4_trans(scores, at(step));
    } else {
      ldmatrix_x4(scores, at(step));
    }
  }

  CUKIT_DEVICE void load(Packed& scores) const {
#pragma unroll
    for (int step = 0; step < TILE_M / 16; ++step) load(scores[step], step);
  }

 private:
  // Address of the lane's row of its 8x8 matrix: the second matrix has the next eight keys, the
  // third the next eight queries.
  CUKIT_DEVICE unsigned at(int step) const {
    const unsigned lane = threadIdx.x % kWarpSize;
    if constexpr (kTransposed) {
      return ScoreTile::address(tile_, 16 * step + lane / 16 * 8 + lane % 8,
                                first_key_ / 8 + lane / 8 % 2);
    } else {
      return ScoreTile::address(tile_, first_key_ + lane % 16, 2 * step + lane / 16);
    }
  }

  unsigned tile_, first_key_;
};

// Whether bias or mask is loaded before the scores are complete. Other combinations of options
// leave too few registers to hold it.
constexpr bool kPrefetchBias = BIAS == 1 && !MASK && !SOFTCAP;
constexpr bool kPrefetchMask = MASK && !SOFTCAP && !BIAS;

// A lane's share of a tile's bias and mask, loaded before the scores are complete. Rows are read in
// words where they are aligned and all keys of the warp exist; otherwise element by element when
// needed.
struct Prefetched {
#if BIAS == 1
  Packed bias;  // 8x8 blocks (queries by keys): lane 4 r + c has keys 2 c and 2 c + 1 of query r
  bool has_bias;

  CUKIT_DEVICE void load_bias(const TileScores& tile) {
    const int lane = threadIdx.x % kWarpSize;
    const HeadScores& head = tile.head;
    const long long row_stride = tile.settings.bias_row;
    has_bias = tile.has_all_keys() && tile.settings.bias_column == 1 && row_stride % 2 == 0 &&
               reinterpret_cast<unsigned long long>(head.bias) % 4 == 0;
    if (has_bias) {
      const bias_t* const first = head.bias + tile.first_key + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < TILE_M / 8; ++n) {
        const int query = min(tile.first_query + 8 * n + lane / 4, head.seq_q - 1);
        const bias_t* const row = first + query * row_stride;
        bias[n / 2][n % 2 * 2] = *reinterpret_cast<const unsigned*>(row);
        bias[n / 2][n % 2 * 2 + 1] = *reinterpret_cast<const unsigned*>(row + 8);
      }
    }
  }

  // Not unrolled, to save registers.
  CUKIT_DEVICE void read_bias(const TileScores& tile) {
    const int lane = threadIdx.x % kWarpSize;
    const HeadScores& head = tile.head;
    const long long column_stride = tile.settings.bias_column;
#pragma unroll 1
    for (int block = 0; block < TILE_M / 4; ++block) {
      const int query = tile.first_query + block / 2 * 8 + lane / 4;
      const int key = tile.first_key + block % 2 * 8 + lane % 4 * 2;
      const bias_t* const from =
          head.bias + query * tile.settings.bias_row + key * column_stride;
      const float low = head.exists(query, key) ? to_float(from[0]) : 0.0f;
      const float high = head.exists(query, key + 1) ? to_float(from[column_stride]) : 0.0f;
      const unsigned pair = pack<element_t>(low, high);
#pragma unroll
      for (int b = 0; b < TILE_M / 4; ++b) {
        if (b == block) bias[b / 4][b % 4] = pair;
      }
    }
  }
#endif
#if MASK
  uint4 mask[TILE_M / kWarpSize];  // sixteen keys of one query each
  bool has_mask;

  CUKIT_DEVICE void load_mask(const TileScores& tile) {
    const HeadScores& head = tile.head;
    const long long row_stride = tile.settings.mask_row;
    has_mask = tile.has_all_keys() &&
               rows_are_aligned(head.mask, row_stride, tile.settings.mask_column);
    if (has_mask) {
#pragma unroll
      for (int part = 0; part < TILE_M / kWarpSize; ++part) {
        const int query = tile.first_query + part * kWarpSize +
                          static_cast<int>(threadIdx.x) % kWarpSize;
        const unsigned char* const row =
            head.mask + min(query, head.seq_q - 1) * row_stride + tile.first_key;
        mask[part] = *reinterpret_cast<const uint4*>(row);
      }
    }
  }
#endif

  CUKIT_DEVICE void load(const TileScores& tile) {
#if BIAS == 1
    if constexpr (kPrefetchBias) load_bias(tile);
#endif
#if MASK
    if constexpr (kPrefetchMask) load_mask(tile);
#endif
  }
};

// BIAS: turns products into scores in log2 units and, with SOFTCAP, stores their derivatives.
// biases(n, half) returns the biases of the lane's scores 4 n + 2 half and 4 n + 2 half + 1.
template <typename Biases>
CUKIT_DEVICE void add_biases(Scores& scores, const ScoreKeys& slopes, const TileScores& tile,
                             float scale_log2, const Biases& biases) {
  const float ahead = first_ahead(tile);
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    unsigned packed[4];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int n = 2 * step + block / 2, half = block % 2;
      const float2 added = biases(n, half);
      const float place = ahead + static_cast<float>(8 * n - 8 * half);
      float* const pair = &scores[4 * n + 2 * half];
      float slope[2];
      pair[0] = fmaf(added.x, kLog2E, modified(pair[0], place, tile, scale_log2, slope[0]));
      pair[1] = fmaf(added.y, kLog2E, modified(pair[1], place + 1.0f, tile, scale_log2, slope[1]));
      if constexpr (SOFTCAP) packed[block] = pack<element_t>(slope[0], slope[1]);
    }
    if constexpr (SOFTCAP) slopes.store(step, packed);
  }
}

CUKIT_DEVICE void add_bias(Scores& scores, const ScoreKeys& slopes, const TileScores& tile,
                           Prefetched& prefetched, float scale_log2) {
#if BIAS == 1
  if constexpr (!kPrefetchBias) prefetched.load_bias(tile);
  if (!prefetched.has_bias) prefetched.read_bias(tile);
  add_biases(scores, slopes, tile, scale_log2, [&](int n, int half) {
    float pair[2];
    unpack<element_t>(pair, transpose_8x8(prefetched.bias[n / 2][n % 2 * 2 + half]));
    return make_float2(pair[0], pair[1]);
  });
#else
  const int lane = threadIdx.x % kWarpSize;
  const HeadScores& head = tile.head;
  const int first_query = tile.first_query + lane % 4 * 2;
  const int first_key = tile.first_key + lane / 4;
  const auto bias = [&](int query, int key) {
    return head.exists(query, key) ? to_float(head.bias[query * tile.settings.bias_row +
                                                        key * tile.settings.bias_column])
                                   : 0.0f;
  };
  add_biases(scores, slopes, tile, scale_log2, [&](int n, int half) {
    if (n % 4 == 0 && half == 0) __syncwarp();  // limits loads in flight, to save registers
    const int query = first_query + 8 * n, key = first_key + 8 * half;
    return make_float2(bias(query, key), bias(query + 1, key));
  });
#endif
}

// MASK: -infinity where the byte is 0. A lane holds sixteen keys of one query; ballots give each
// lane the bits of 32 queries for each of the two keys of its scores.
CUKIT_DEVICE void apply_mask(Scores& scores, const TileScores& tile, Prefetched& prefetched) {
#if MASK
  if constexpr (!kPrefetchMask) prefetched.load_mask(tile);
  const int lane = threadIdx.x % kWarpSize;
  const HeadScores& head = tile.head;
#pragma unroll
  for (int part = 0; part < TILE_M / kWarpSize; ++part) {
    unsigned visible[2] = {};
    if (prefetched.has_mask) {
      const uint4& read = prefetched.mask[part];
      const unsigned words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int key = 0; key < kWarpKeys; ++key) {
        const unsigned queries =
            __ballot_sync(kFullMask, (words[key / 4] & 0xffu << key % 4 * 8) != 0);
        if (lane / 4 == key % 8) visible[key / 8] = queries;
      }
    } else {
      const int query = min(tile.first_query + part * kWarpSize + lane, head.seq_q - 1);
      const unsigned char* const row = head.mask + query * tile.settings.mask_row +
                                       tile.first_key * tile.settings.mask_column;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll 1
        for (int key = 8 * half; key < 8 * half + 8; ++key) {
          const unsigned queries =
              __ballot_sync(kFullMask, tile.first_key + key < head.seq_kv &&
                                           row[key * tile.settings.mask_column] != 0);
          if (lane / 4 == key % 8) visible[half] = queries;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned own = visible[half] >> lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kWarpSize / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[4 * (part * kWarpSize / 8 + n) + 2 * half + i];
          if (!(own >> (8 * n + i) & 1u)) score = -infinity();
        }
    }
  }
#endif
}

}  // namespace cukit::backward
