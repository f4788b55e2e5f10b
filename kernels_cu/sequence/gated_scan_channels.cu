// Decayed queries, keys and scores of a gated linear recurrence with a decay per state channel,
// chunk by chunk, for gated_scan_sm80.cu, gated_scan_sm90.cu and their backward kernels with
// CHANNELS.
//
//   h_t = diag(exp(l_t)) h_{t-1} + b_t x_t^T      y_t = h_t^T c_t      l_t <= 0, one per head and channel
//
// With s_i the sum of a chunk's log decays l up to token i, products per channel:
//   queries_i = exp(s_i) c_i    keys_j = exp(s_last - s_j) b_j    scores_ij = sum (exp(s_i - s_j) c_i b_j), j <= i
// Then y_i = h^T queries_i + sum_j scores_ij x_j and h' = exp(s_last) h + sum_j keys_j x_j^T.
// Scores between different sub-chunks, and within sub-chunks whose decays are not extreme
// (decay_in_range in channels.cuh), are tensor-core products; the others are sums of
// exp(s_i - s_j) c_i b_j in float. l is clamped to [-104, 0].
// Paper: Yang et al., arXiv:2312.06635.
//
// Mapping: grid (slots, heads of the launch), a block of four warps per chunk of 64 tokens, a warp
//   per sub-chunk of 16.
// Shared memory, dynamic: queries and keys, 64 x STATE_TILE x 2 bytes each; 64 x (STATE_TILE + 8)
//   floats, whose first 64 x 64 x 2 bytes the scores reuse. Static: 12 x STATE_TILE floats.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; PADDED 0|1: state_dim is not STATE_TILE
//   (it is a multiple of 8); CHANNELS 1; THREADS 128. Minimum architecture: sm_80. Accumulates in float;
//   deterministic.
// Reference: cukit/reference/sequence.py, gated_scan.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/pack.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "sequence/channels.cuh"
#include "sequence/chunks.cuh"
#include "sequence/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::ChannelTiles;
using cukit::kChunk;
using cukit::kSub;
using cukit::kSubs;
using cukit::kWarpSize;
using Scores = cukit::Swizzle<kChunk>;

// Scores within a warp's sub-chunk, from unscaled tiles: lane l computes row l / 2, columns 8 (l % 2) to 8 (l % 2)
// + 7.
CUKIT_DEVICE void exact_scores(float (&scores)[8], const ChannelTiles& tiles, int warp) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = kSub * warp + lane / 2, first = kSub * warp + 8 * (lane % 2);
#pragma unroll
  for (float& score : scores) score = 0.0f;
#pragma unroll 1
  for (int word = 0; word < STATE_TILE / 8; ++word) {
    float query[8];
    cukit::unpack_eight(query, tiles.queries + ChannelTiles::Keys::offset(row, word));
    const float* cumsum = tiles.cumsum + row * cukit::kChannelPitch + 8 * word;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (first + j > row) break;
      float key[8];
      cukit::unpack_eight(key, tiles.keys + ChannelTiles::Keys::offset(first + j, word));
      const float* key_cumsum = tiles.cumsum + (first + j) * cukit::kChannelPitch + 8 * word;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scores[j] = fmaf(query[i] * key[i], exp2f(cumsum[i] - key_cumsum[i]), scores[j]);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_channels(
    const T* __restrict__ b,              // [tokens, num_groups, state_dim]
    const T* __restrict__ c,              // [tokens, num_groups, state_dim]
    const float* __restrict__ log_decay,  // [tokens, num_heads, state_dim]
    const int* __restrict__ cu_seqlens,   // [num_sequences + 1] or null: seq_len each
    T* __restrict__ keys,                 // [tokens, heads, state_dim]
    T* __restrict__ queries,              // [tokens, heads, state_dim]
    float* __restrict__ chunk_decay,      // [slots, heads, state_dim], s_last, log2
    T* __restrict__ scores,               // [slots, heads, 64, 64], 0 for j > i
    const __grid_constant__ cukit::ScanParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  __shared__ float sums[kSubs][STATE_TILE];    // d
  __shared__ float before[kSubs][STATE_TILE];  // decay from the chunk's start to the sub-chunk
  __shared__ float after[kSubs][STATE_TILE];   // decay from the sub-chunk's end to the chunk's
  const cukit::ChunkSlot slot(p, cu_seqlens);
  if (slot.rows == 0) return;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const long long key_stride = static_cast<long long>(p.num_groups) * p.state_dim;
  const long long decay_stride = static_cast<long long>(p.num_heads) * p.state_dim;
  const long long head_stride = static_cast<long long>(p.heads) * p.state_dim;
  const long long key_at = slot.token * key_stride + slot.group * p.state_dim;
  const long long decay_at = slot.token * decay_stride + slot.head * p.state_dim;
  const long long head_at = slot.token * head_stride + slot.local_head * p.state_dim;

  const ChannelTiles tiles(memory);
  tiles.start(c + key_at, b + key_at, log_decay + decay_at, key_stride, decay_stride, slot.rows, p.state_dim);
  cukit::cp_async_wait<0>();
  __syncthreads();
  tiles.scan(sums);
  __syncthreads();
  cukit::sub_chunk_decays(before, after, sums);
  if (static_cast<int>(threadIdx.x) < p.state_dim) {
    float sum = 0.0f;
#pragma unroll
    for (const auto& of_sub : sums) sum += of_sub[threadIdx.x];
    chunk_decay[slot.place * p.state_dim + threadIdx.x] = sum;
  }
  const bool in_range = cukit::decay_in_range(sums[warp]);
  float exact[8];
  if (!in_range) exact_scores(exact, tiles, warp);
  __syncthreads();

  cukit::each_eight(tiles, warp, [&](int row, int column, unsigned at, const float* cumsum) {
    float query[8], key[8];
    cukit::scale_queries_and_keys(query, key, tiles, at, cumsum, sums[warp] + column);
    if (row >= slot.rows || (PADDED && column >= p.state_dim)) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      query[i] *= before[warp][column + i];
      key[i] *= after[warp][column + i];
    }
    const long long to = head_at + row * head_stride + column;
    *reinterpret_cast<uint4*>(queries + to) = cukit::pack_eight(query);
    *reinterpret_cast<uint4*>(keys + to) = cukit::pack_eight(key);
  });
  __syncthreads();

  unsigned char* const tile = reinterpret_cast<unsigned char*>(tiles.cumsum);
  const cukit::LeftMK<STATE_TILE> rows(cukit::shared_address(tiles.queries), kSub * warp, 0);
  const cukit::RightNK<STATE_TILE> columns(cukit::shared_address(tiles.keys), 0, 0);
#pragma unroll
  for (int sub = 0; sub < kSubs; ++sub) {
    float out[1][2][4];
    cukit::clear(out);
    if (sub < warp || (sub == warp && in_range)) {
      cukit::warp_product<T, STATE_TILE / 16>(
          out,
          [&](unsigned(&r)[4], int, int k) {
            rows(r, 0, 16 * k);
            if (sub == warp - 1) return;
            // The queries are decayed from the start of their sub-chunk. This factor makes it a
            // decay from the end of the keys' sub-chunk.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float factor[2];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int channel = 16 * k + 8 * half + 2 * (lane % 4) + i;
                float between = sub == warp ? -sums[warp][channel] : 0.0f;
#pragma unroll
                for (int s = sub + 1; s < kSubs - 1; ++s) between += s < warp ? sums[s][channel] : 0.0f;
                factor[i] = exp2f(between);
              }
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float pair[2];
                cukit::unpack<T>(pair, r[2 * half + i]);
                r[2 * half + i] = cukit::pack<T>(pair[0] * factor[0], pair[1] * factor[1]);
              }
            }
          },
          [&](unsigned(&r)[4], int n, int k) { columns(r, kSub * sub + 8 * n, 16 * k); });
    }
    if (sub == warp && !in_range) {
      const unsigned to = Scores::offset(kSub * warp + lane / 2, 2 * sub + lane % 2);
      *reinterpret_cast<uint4*>(tile + to) = cukit::pack_eight(exact);
      continue;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half, key = 8 * n + 2 * (lane % 4);
        const float* pair = &out[0][n][2 * half];
        const unsigned to = Scores::offset(kSub * warp + row, 2 * sub + n) + 4 * (lane % 4);
        *reinterpret_cast<unsigned*>(tile + to) =
            sub < warp ? cukit::pack<T>(pair[0], pair[1])
                       : cukit::pack<T>(key <= row && sub == warp ? pair[0] : 0.0f,
                                        key + 1 <= row && sub == warp ? pair[1] : 0.0f);
      }
  }
  __syncwarp();
  cukit::store_tile<kSub, kChunk, kWarpSize, false>(scores + slot.place * (kChunk * kChunk), kChunk, tile,
                                                    kSub * warp, kChunk, kChunk, lane);
}
