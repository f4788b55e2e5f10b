// Shared by the kernels of products with a quantised weight: the types that the macros select,
// decoding, the epilogue, and the sum of partial tiles that several blocks have computed.
//
// Macros: DTYPE float16|bfloat16 (bias, out, and x unless FLOAT8); FLOAT8 0|1: x is float8 (e4m3);
//   BITS 4|8 (8 only without FLOAT8); GROUP 32|64|128, or 0 for one scale per row; ZERO_POINTS 0|1
//   (int4 with groups); SCALE float16|bfloat16|float32; FOLD 0|1: with 1, codes are multiplied by
//   their scales and rounded to DTYPE before the product; with 0, a group's accumulators are scaled
//   in float; TOKENS of a tile; CONSUMERS: warpgroups with 64 rows of the weight each.
#pragma once

#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/tile_scheduler.cuh"
#include "common/types.cuh"
#include "gemm/weight_codes.cuh"

namespace {

using cukit::bfloat16;
using cukit::float16;
using cukit::float32;
using T = cukit::element_t;
using Scale = SCALE;

template <int Bits, bool Float8>
struct CodesOf;
template <>
struct CodesOf<4, false> { using type = cukit::Int4Codes<T>; };
template <>
struct CodesOf<8, false> { using type = cukit::Int8Codes<T>; };
template <>
struct CodesOf<4, true> { using type = cukit::Int4Float8Codes; };

using Codes = CodesOf<BITS, FLOAT8>::type;
using Weight = cukit::WeightBlock<Codes, Scale, GROUP, ZERO_POINTS>;
using Schedule = cukit::StreamKTiles;
using Tile = cukit::StreamKTile;

// A lane's accumulators of 64 rows x TOKENS: element 4 n + 2 half + i is row accumulator_row() + 8
// half, token 8 n + accumulator_column() + i.
using TileAccumulators = float[TOKENS / 2];

// Columns decoded at a time, while the previous chunk is multiplied: at most one group, or with
// FOLD two groups of 32.
constexpr int kChunk = GROUP == 32 && !FOLD ? 32 : 64;
constexpr int kChunkSteps = kChunk / Codes::kStepColumns;
constexpr int kChunks = cukit::kBlockColumns / kChunk;
constexpr int kChunkGroups = GROUP && GROUP < kChunk ? kChunk / GROUP : 1;
constexpr int kGroupChunks = !GROUP ? kChunks : GROUP > kChunk ? GROUP / kChunk : 1;

constexpr bool kScaleByGroup = GROUP != 0 && !FOLD;

using Operand = unsigned[kChunkSteps][4];

// Decodes a chunk of a weight block in shared memory to operand a.
CUKIT_DEVICE void decode(Operand& a, const unsigned char* block, int chunk,
                         const unsigned char* tables) {
  constexpr int kSteps = kChunkSteps / kChunkGroups;
  unsigned words[kChunkSteps * Codes::kWords];
  Weight::load<kChunkSteps>(words, block, chunk * kChunkSteps);
#pragma unroll
  for (int part = 0; part < kChunkGroups; ++part) {
    const int group = chunk / kGroupChunks * kChunkGroups + part;
    const Codes::Zeros zeros =
        Weight::zeros(Weight::zero_points(block, group, threadIdx.x % 128), tables);
#pragma unroll
    for (int i = part * kSteps; i < (part + 1) * kSteps; ++i) {
      Codes::decode(a[i], &words[i * Codes::kWords], zeros);
    }
    if constexpr (FOLD) {
      float scale[2];
      Weight::scales(scale, block, group);
      const unsigned factors[2] = {cukit::pack<T>(scale[0], scale[0]),
                                   cukit::pack<T>(scale[1], scale[1])};
#pragma unroll
      for (int i = part * kSteps; i < (part + 1) * kSteps; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          a[i][j] = cukit::detail::multiply_pairs(T(), a[i][j], factors[j % 2]);
        }
    }
  }
}

CUKIT_DEVICE void clear(TileAccumulators& acc) {
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0.0f;
}

CUKIT_DEVICE void add_scaled(TileAccumulators& acc, const TileAccumulators& group_acc,
                             const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) acc[i] += scale[i / 2 % 2] * group_acc[i];
}

// The first row of a consumer's part of a tile.
CUKIT_DEVICE int first_row(const Tile& tile, int consumer) {
  return (tile.m * CONSUMERS + consumer) * cukit::kBlockRows;
}

// The epilogue of 64 rows starting at `row` and 2 N tokens starting at `token`.
struct Epilogue {
  const T* bias;              // [rows] or null
  const Scale* scales;        // GROUP 0: [rows]
  const float* token_scales;  // FLOAT8: [tokens], or [1] if token_stride is 0
  int token_stride;
  int tokens, rows;

  // Applies the scales per row and per token, and the bias.
  template <int N>
  CUKIT_DEVICE void finish(float (&acc)[N], int row, int token) const {
    float scale[2], offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = row + cukit::accumulator_row() + 8 * half;
      const bool exists = own_row < rows;
      offset[half] = bias && exists ? cukit::to_float(bias[own_row]) : 0.0f;
      scale[half] = !GROUP && exists ? cukit::to_float(scales[own_row]) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int half = i / 2 % 2;
      float factor = scale[half];
      if constexpr (FLOAT8) {
        const int own_token = token + cukit::accumulator_column() + i / 4 * 8 + i % 2;
        if (own_token < tokens) factor *= token_scales[own_token * token_stride];
      }
      acc[i] = GROUP && !FLOAT8 ? acc[i] + offset[half] : acc[i] * factor + offset[half];
    }
  }

  // Stores element by element: for few tokens, and for rows that TMA cannot address.
  template <int N>
  CUKIT_DEVICE void store(T* out, const float (&acc)[N], int row, int token) const {
    const int lane_row = row + cukit::accumulator_row();
    const int first_token = token + cukit::accumulator_column();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int own_row = lane_row + i / 2 % 2 * 8;
      const int own_token = first_token + i / 4 * 8 + i % 2;
      if (own_row < rows && own_token < tokens) {
        out[static_cast<long long>(own_token) * rows + own_row] = cukit::from_float<T>(acc[i]);
      }
    }
  }
};

// The final sum of tiles that are split along k over several blocks: each block writes its part to
// `pieces` and increments the tile's counter; the last block to arrive adds all parts in the order
// of k. No block waits for another.
struct StreamKFixup {
  Schedule schedule;
  float4* pieces;  // [2 * blocks][CONSUMERS][TOKENS / 8][128 threads]
  int* arrivals;   // [shared tiles][CONSUMERS], zeros before and after the launch
  int* last;       // this consumer's word in shared memory
  int tokens;
  int consumer;

  // Returns whether `acc` now holds the complete tile.
  CUKIT_DEVICE bool complete(TileAccumulators& acc, const Tile& tile) const {
    return !schedule.in_pieces(tile) || collect(acc, tile);
  }

 private:
  CUKIT_DEVICE float4* piece(int slot) const {
    return pieces + (slot * CONSUMERS + consumer) * (TOKENS / 8) * 128 + threadIdx.x % 128;
  }

  // In the last block to arrive, adds up the parts of the tile; returns false in the others.
  CUKIT_DEVICE bool collect(TileAccumulators& acc, const Tile& tile) const {
    const int used = min((tokens - tile.n * TOKENS + 7) / 8, TOKENS / 8);  // groups of 8 tokens
    const int first = schedule.first_block(tile.shared);
    const int end = schedule.last_block(tile.shared) + 1;
    float4* const own = piece(schedule.slot(blockIdx.x, tile.shared));
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
      if (n < used) {
        own[n * 128] = make_float4(acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]);
      }
    }
    cukit::named_sync(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) {
      int* const counter = arrivals + tile.shared * CONSUMERS + consumer;
      __threadfence();
      const bool is_last = atomicAdd(counter, 1) == end - first - 1;
      __threadfence();
      if (is_last) *counter = 0;
      *last = is_last;
    }
    cukit::named_sync(1 + consumer, 128);
    if (!*last) return false;
    // Only the first block can have its part in its second slot, at the end of its range of steps.
    const float4* from = piece(schedule.slot(first, tile.shared));
    clear(acc);
#pragma unroll(TOKENS <= 32 ? 4 : 1)
    for (int block = first; block < end; ++block) {
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n) {
        if (n < used) {
          const float4 four = __ldcg(from + n * 128);
          acc[4 * n] += four.x;
          acc[4 * n + 1] += four.y;
          acc[4 * n + 2] += four.z;
          acc[4 * n + 3] += four.w;
        }
      }
      from = piece(2 * (block + 1));
    }
    return true;
  }
};

}  // namespace
