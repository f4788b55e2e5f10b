// The log decays of a chunk with a decay per state channel, for gated_scan_channels.cu and
// gated_scan_channels_backward.cu.
//
// A chunk has four sub-chunks of 16 tokens. With w_i the sum of the log decays of a token's
// sub-chunk up to token i, and d the sum of all 16, the decay between tokens j <= i is
//   of one sub-chunk      exp(w_i - w_j)
//   of sub-chunks J < I   exp(w_i) exp(d_{J+1} + ... + d_{I-1}) exp(d_J - w_j)
// All factors are at most 1. Products over channels use keys b_j exp(d_J - w_j) and queries
// c_i exp(w_i). Within a sub-chunk, exp(w_i - w_j) is computed as exp(w_i - d) exp(d - w_j) if
// exp(-d) does not exceed 2^kFastRange, else from the difference w_i - w_j.
// Macros: DTYPE, STATE_TILE, PADDED, THREADS 128.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/pack.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "sequence/chunks.cuh"
#include "sequence/parameters.cuh"

namespace cukit {

constexpr int kSub = 16;  // tokens
constexpr int kSubs = kChunk / kSub;
constexpr int kChannelPitch = STATE_TILE + 8;  // floats
// Queries and keys keep their precision in T when they are scaled by a factor of at least
// 2^-kFastRange.
template <typename T>
constexpr float kFastRange = 60.0f;
template <>
constexpr float kFastRange<__half> = 6.0f;

// One chunk in shared memory. A warp scales the rows of one sub-chunk.
struct ChannelTiles {
  static constexpr int kKeyBytes = kChunk * STATE_TILE * 2;
  static constexpr int kDecayBytes = kChunk * kChannelPitch * 4;
  static constexpr int kBytes = 2 * kKeyBytes + kDecayBytes;
  using Keys = Swizzle<STATE_TILE>;

  unsigned char *queries, *keys;  // [kChunk][STATE_TILE], elements
  float* cumsum;                  // w, [kChunk][kChannelPitch], log2

  CUKIT_DEVICE explicit ChannelTiles(unsigned char* memory)
      : queries(memory),
        keys(memory + kKeyBytes),
        cumsum(reinterpret_cast<float*>(memory + 2 * kKeyBytes)) {}

  // Starts the copies of a chunk; c, b and log_decay point to its first row.
  CUKIT_DEVICE void start(const element_t* c, const element_t* b, const float* log_decay, long long key_stride,
                          long long decay_stride, int rows, int state_dim) const {
    using Copy = TileCopy<kChunk, STATE_TILE, THREADS, PADDED>;
    Copy::start(shared_address(queries), c, key_stride, rows, state_dim);
    Copy::start(shared_address(keys), b, key_stride, rows, state_dim);
    constexpr int kWords = STATE_TILE / 4;  // of 16 bytes
    const unsigned to = shared_address(cumsum);
#pragma unroll 4
    for (int i = threadIdx.x; i < kChunk * kWords; i += THREADS) {
      const int row = i / kWords, column = i % kWords * 4;
      cp_async_16(to + 4 * (row * kChannelPitch + column), log_decay + row * decay_stride + column,
                  row < rows && column < state_dim);
    }
    cp_async_commit();
  }

  // Replaces log decays by their sums w; sums[sub-chunk][channel] becomes d. Called by all threads; the caller
  // synchronises.
  CUKIT_DEVICE void scan(float (&sums)[kSubs][STATE_TILE]) const {
#pragma unroll
    for (int first = 0; first < kSubs * STATE_TILE; first += THREADS) {
      const int sub = (first + static_cast<int>(threadIdx.x)) / STATE_TILE;
      const int channel = (first + static_cast<int>(threadIdx.x)) % STATE_TILE;
      float* at = cumsum + sub * (kSub * kChannelPitch) + channel;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        sum += clamped_decay(at[i * kChannelPitch]);
        at[i * kChannelPitch] = sum;
      }
      sums[sub][channel] = sum;
    }
  }
};

// Whether a warp's sub-chunk decays by a factor of at most 2^kFastRange in every channel. sums: d
// of the sub-chunk, per channel.
CUKIT_DEVICE bool decay_in_range(const float (&sums)[STATE_TILE]) {
  bool in_range = true;
#pragma unroll
  for (int i = 0; i < STATE_TILE / kWarpSize; ++i) {
    in_range = in_range && -sums[i * kWarpSize + threadIdx.x % kWarpSize] <= kFastRange<element_t>;
  }
  return __all_sync(kFullMask, in_range);
}

// Calls body(row, column, offset, w) for every group of eight columns of a warp's 16 rows. offset:
// in queries and in keys, in bytes; w: points to w of these columns.
template <typename Body>
CUKIT_DEVICE void each_eight(const ChannelTiles& tiles, int warp, const Body& body) {
  constexpr int kWords = STATE_TILE / 8;
#pragma unroll 2
  for (int i = threadIdx.x % kWarpSize; i < kSub * kWords; i += kWarpSize) {
    const int row = warp * kSub + i / kWords, column = i % kWords * 8;
    body(row, column, ChannelTiles::Keys::offset(row, i % kWords), tiles.cumsum + row * kChannelPitch + column);
  }
}

CUKIT_DEVICE void unpack_eight(float (&to)[8], const unsigned char* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const unsigned all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float pair[2];
    unpack<element_t>(pair, all[i]);
    to[2 * i] = pair[0];
    to[2 * i + 1] = pair[1];
  }
}

CUKIT_DEVICE uint4 pack_eight(const float (&from)[8]) {
  return make_uint4(pack<element_t>(from[0], from[1]), pack<element_t>(from[2], from[3]),
                    pack<element_t>(from[4], from[5]), pack<element_t>(from[6], from[7]));
}

// The decays from the start of the chunk to each sub-chunk (before), and from the end of each
// sub-chunk to the end of the chunk (after). One thread per channel; the other threads do nothing.
CUKIT_DEVICE void sub_chunk_decays(float (&before)[kSubs][STATE_TILE],
                                   float (&after)[kSubs][STATE_TILE],
                                   const float (&sums)[kSubs][STATE_TILE]) {
  const int channel = threadIdx.x;
  if (channel >= STATE_TILE) return;
  float cumsum = 0.0f, rest = 0.0f;
#pragma unroll
  for (int sub = 0; sub < kSubs; ++sub) {
    before[sub][channel] = exp2f(cumsum);
    cumsum += sums[sub][channel];
    after[kSubs - 1 - sub][channel] = exp2f(rest);
    rest += sums[kSubs - 1 - sub][channel];
  }
}

// Scales eight queries and keys of a token in place and returns them: c exp(w), b exp(d - w).
// `cumsum` points to w, `sums` to d.
CUKIT_DEVICE void scale_queries_and_keys(float (&query)[8], float (&key)[8], const ChannelTiles& tiles, unsigned at,
                                         const float* cumsum, const float* sums) {
  unpack_eight(query, tiles.queries + at);
  unpack_eight(key, tiles.keys + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    query[i] *= exp2f(cumsum[i]);
    key[i] *= exp2f(sums[i] - cumsum[i]);
  }
  *reinterpret_cast<uint4*>(tiles.queries + at) = pack_eight(query);
  *reinterpret_cast<uint4*>(tiles.keys + at) = pack_eight(key);
}

}  // namespace cukit
