// Gradients of keys, queries and decays of a gated linear recurrence with a decay per state
// channel, from the results of gated_scan_backward_sm80.cu or _sm90.cu with CHANNELS.
//
// With s, h, g and d_i as in gated_scan_backward_sm80.cu, but s per channel, e_ij = exp(s_i - s_j), V_ij = d_i . x_j
// for j <= i, products per channel:
//   dc_i = exp(s_i) (h d_i) + sum_{j <= i} V_ij e_ij b_j
//   db_j = exp(s_last - s_j) (g x_j) + sum_{i >= j} V_ij e_ij c_i
//   dl_t = sum_{i >= t > j} V_ij e_ij c_i b_j + sum_{i >= t} exp(s_i) c_i (h d_i)
//        + sum_{j < t} exp(s_last - s_j) b_j (g x_j) + exp(s_last) <g, h>
// dl is a prefix sum: the term of a pair j < i is added after token j and subtracted after token i,
// both times as a product of the same rounded factors, so that the two cancel. Sums over different
// sub-chunks are tensor-core products, decayed from one sub-chunk to the next: sum = exp(d) sum +
// V_IJ keys_J, with the sub-chunk's d of channels.cuh. Sums within a sub-chunk are also tensor-core
// products, unless the decays of the sub-chunk are extreme (decay_in_range in channels.cuh). Pairs
// i = j do not contribute to dl; their terms of dc and db are added in float. dl is 0 where l is
// clamped.
// Paper: Yang et al., arXiv:2312.06635.
//
// Mapping: grid (slots, heads of the launch), a block of four warps per chunk of 64 tokens; warp w
//   computes dc and db of tokens 16 w to 16 w + 15, 64 channels at a time.
// Shared memory, dynamic: queries and keys, 64 x STATE_TILE x 2 bytes each; 64 x (STATE_TILE + 8)
//   floats; 64 x 64 x 2 bytes of V. Static: 16 x STATE_TILE + 64 floats.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; PADDED 0|1: state_dim is not STATE_TILE
//   (it is a multiple of 8); CHANNELS 1; THREADS 128. Minimum architecture: sm_80. Accumulates in float;
//   deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_backward.
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

constexpr int kPart = 64;  // channels
template <bool Value>
struct Queries {
  static constexpr bool kValue = Value;
};

using Accumulators = float[1][kPart / 8][4];

// Multiplies columns by 2^sums.
CUKIT_DEVICE void decay_columns(Accumulators& acc, const float* sums) {
#pragma unroll
  for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float by = exp2f(sums[8 * n + 2 * (threadIdx.x % 4) + i]);
      acc[0][n][i] *= by;
      acc[0][n][2 + i] *= by;
    }
}

CUKIT_DEVICE float score_at(const unsigned char* tile, int row, int column) {
  return cukit::to_float(*reinterpret_cast<const T*>(tile + Scores::offset(row, column / 8) + 2 * (column % 8)));
}

// Two adjacent elements of global memory, or zeros.
CUKIT_DEVICE void load_pair(float (&to)[2], const T* from, bool exists) {
  cukit::unpack<T>(to, exists ? *reinterpret_cast<const unsigned*>(from) : 0u);
}

// Two adjacent elements, or zeros, summed over `parts` arrays that are `stride` elements apart.
CUKIT_DEVICE void load_sum(float (&to)[2], const T* from, int parts, int stride, bool exists) {
  load_pair(to, from, exists);
  for (int part = 1; part < parts; ++part) {
    float more[2];
    load_pair(more, from + part * stride, exists);
    to[0] += more[0];
    to[1] += more[1];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_scan_channels_backward(
    const T* __restrict__ b,              // [tokens, num_groups, state_dim]
    const T* __restrict__ c,              // [tokens, num_groups, state_dim]
    const float* __restrict__ log_decay,  // [tokens, num_heads, state_dim]
    const int* __restrict__ cu_seqlens,   // [num_sequences + 1] or null: seq_len each
    const T* state_b,                     // g x, [tokens, heads, tiles, state_dim]
    const T* state_c,                     // h d, [tokens, heads, tiles, state_dim]
    const float* __restrict__ passing,    // exp(s_last) <g, h>, [slots, heads, tiles, state_dim]
    const T* __restrict__ grad_scores,    // V, [slots, heads, tiles, 64, 64]; not read for j > i
    T* grad_b,                            // [tokens, heads, state_dim], with one tile may be state_b
    T* grad_c,                            // [tokens, heads, state_dim], with one tile may be state_c
    float* __restrict__ grad_decay,       // [tokens, num_heads, state_dim]
    const __grid_constant__ cukit::ScanParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  __shared__ float sums[kSubs][STATE_TILE];    // d of channels.cuh
  __shared__ float before[kSubs][STATE_TILE];  // decay from the chunk's start to the sub-chunk
  __shared__ float after[kSubs][STATE_TILE];   // decay from the sub-chunk's end to the chunk's
  __shared__ float reads[kSubs][STATE_TILE];   // sums of exp(s_i) c_i (h d_i)
  __shared__ float diagonal[kChunk];           // V_ii
  const cukit::ChunkSlot slot(p, cu_seqlens);
  if (slot.rows == 0) return;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int tiles = (p.head_dim + cukit::kHeadColumns - 1) / cukit::kHeadColumns;
  const long long key_stride = static_cast<long long>(p.num_groups) * p.state_dim;
  const long long decay_stride = static_cast<long long>(p.num_heads) * p.state_dim;
  const long long head_stride = static_cast<long long>(p.heads) * p.state_dim;
  const long long key_at = slot.token * key_stride + slot.group * p.state_dim;
  const long long decay_at = slot.token * decay_stride + slot.head * p.state_dim;
  const long long head_at = slot.token * head_stride + slot.local_head * p.state_dim;

  const ChannelTiles chunk(memory);
  unsigned char* const scores = memory + ChannelTiles::kBytes;
  chunk.start(c + key_at, b + key_at, log_decay + decay_at, key_stride, decay_stride, slot.rows, p.state_dim);
  grad_scores += slot.place * tiles * (kChunk * kChunk);
#pragma unroll 2
  for (int i = threadIdx.x; i < kChunk * kChunk / 2; i += THREADS) {
    const int row = i / (kChunk / 2), column = i % (kChunk / 2) * 2;
    float pair[2];
    load_sum(pair, grad_scores + 2 * i, tiles, kChunk * kChunk, column <= row);
    if (column == row) diagonal[row] = pair[0];
    if (column + 1 == row) diagonal[row] = pair[1];
    *reinterpret_cast<unsigned*>(scores + Scores::offset(row, column / 8) + 2 * (column % 8)) =
        cukit::pack<T>(column < row ? pair[0] : 0.0f, column + 1 < row ? pair[1] : 0.0f);
  }
  cukit::cp_async_wait<0>();
  __syncthreads();
  chunk.scan(sums);
  __syncthreads();
  cukit::sub_chunk_decays(before, after, sums);
  const bool in_range = cukit::decay_in_range(sums[warp]);
  cukit::each_eight(chunk, warp, [&](int, int column, unsigned at, const float* cumsum) {
    float query[8], key[8];
    cukit::scale_queries_and_keys(query, key, chunk, at, cumsum, sums[warp] + column);
  });
  __syncthreads();

  const long long state_stride = head_stride * tiles;
  const long long state_at = head_at * tiles;
  const unsigned score_at_ = cukit::shared_address(scores);
  const cukit::LeftMK<kChunk> score_rows(score_at_, kSub * warp, 0);
  const cukit::LeftKM<kChunk, 16> score_columns(score_at_, 0, kSub * warp);
#pragma unroll 1
  for (int first = 0; first < STATE_TILE; first += kPart) {
    float change[kPart / 8][4];
    // Finishes dc (queries) or db (keys) of the warp's tokens. `acc` holds the sums over pairs of
    // different tokens, relative to the end (queries) or the start (keys) of the sub-chunk. With
    // extreme decays `acc` lacks the pairs within the sub-chunk and is relative to its start
    // (queries) or end (keys).
    const auto finish = [&](Accumulators& acc, auto of_queries) {
      constexpr bool kQueries = decltype(of_queries)::kValue;
      const T* const own = kQueries ? c : b;
      const T* const other = kQueries ? b : c;
      const T* const states = kQueries ? state_c : state_b;
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
        const int column = first + 8 * n + 2 * (lane % 4);
        float read[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = kSub * warp + lane / 4 + 8 * half;
          const bool exists = row < slot.rows && (!PADDED || column < p.state_dim);
          const long long at = key_at + row * key_stride + column;
          float mine[2], others[2], state[2];
          load_pair(mine, own + at, exists);
          load_pair(others, other + at, exists);
          load_sum(state, states + state_at + row * state_stride + column, tiles, p.state_dim, exists);
          float scaled[2];  // rounded, as in the products with other tokens
          const unsigned char* const tile = kQueries ? chunk.queries : chunk.keys;
          cukit::unpack<T>(scaled, *reinterpret_cast<const unsigned*>(
                                       tile + ChannelTiles::Keys::offset(row, column / 8) + 2 * (column % 8)));
          const float* cumsum = chunk.cumsum + row * cukit::kChannelPitch + column;
          float value[2], crossing[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float whole = sums[warp][column + i];
            const float near = kQueries ? cumsum[i] : whole - cumsum[i];
            const float sum = acc[0][n][2 * half + i] * (in_range ? exp2f(-whole) : 1.0f);
            value[i] = sum * exp2f(near);
            state[i] *= exp2f(near) * (kQueries ? before : after)[warp][column + i];
            crossing[i] = scaled[i] * sum + mine[i] * state[i];
          }
          if (!in_range && exists) {
#pragma unroll 1
            for (int k = kQueries ? kSub * warp : row + 1; k < (kQueries ? row : kSub * (warp + 1)); ++k) {
              float pair[2];
              load_pair(pair, other + key_at + k * key_stride + column, k < slot.rows);
              const float score = kQueries ? score_at(scores, row, k) : score_at(scores, k, row);
              const float* cumsum_k = chunk.cumsum + k * cukit::kChannelPitch + column;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const float between = kQueries ? cumsum[i] - cumsum_k[i] : cumsum_k[i] - cumsum[i];
                const float term = score * pair[i] * exp2f(between);
                value[i] += term;
                crossing[i] = fmaf(mine[i], term, crossing[i]);
              }
            }
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (kQueries) {
              read[i] += mine[i] * state[i];
              change[n][2 * half + i] = -crossing[i];
            } else {
              change[n][2 * half + i] += crossing[i];
            }
            acc[0][n][2 * half + i] = value[i] + state[i] + diagonal[row] * others[i];
          }
        }
        if constexpr (kQueries) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int distance = 4; distance < kWarpSize; distance *= 2) {
              read[i] += __shfl_xor_sync(cukit::kFullMask, read[i], distance);
            }
            if (lane < 4) reads[warp][column + i] = read[i];
          }
        }
      }
      __syncwarp();  // the states have been read
      T* const to = (kQueries ? grad_c : grad_b) + head_at;
      cukit::store_rows<PADDED>(to, head_stride, acc, kSub * warp, slot.rows, first, p.state_dim);
    };

    Accumulators acc;
    cukit::clear(acc);
    const cukit::RightKN<STATE_TILE, kPart> keys(cukit::shared_address(chunk.keys), 0, first);
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      if (sub > warp || (sub == warp && !in_range)) break;
      if (sub > 0) decay_columns(acc, sums[sub] + first);
      cukit::warp_product<T, 1>(
          acc, [&](unsigned(&r)[4], int, int) { score_rows(r, 0, kSub * sub); },
          [&](unsigned(&r)[4], int n, int) { keys(r, kSub * sub, 8 * n); });
    }
    finish(acc, Queries<true>{});

    cukit::clear(acc);
    const cukit::RightKN<STATE_TILE, kPart> queries(cukit::shared_address(chunk.queries), 0, first);
#pragma unroll
    for (int sub = kSubs - 1; sub >= 0; --sub) {
      if (sub < warp || (sub == warp && !in_range)) break;
      if (sub < kSubs - 1) decay_columns(acc, sums[sub] + first);
      cukit::warp_product<T, 1>(
          acc, [&](unsigned(&r)[4], int, int) { score_columns(r, kSub * sub, 0); },
          [&](unsigned(&r)[4], int n, int) { queries(r, kSub * sub, 8 * n); });
    }
    finish(acc, Queries<false>{});

    __syncwarp();  // the sums of these channels have been read
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = kSub * warp + lane / 4 + 8 * (i / 2), column = first + 8 * n + 2 * (lane % 4) + i % 2;
        chunk.cumsum[row * cukit::kChannelPitch + column] = change[n][i];
      }
  }
  __syncthreads();

  const int channel = threadIdx.x;
  if (channel >= p.state_dim) return;
  float grad = 0.0f;
#pragma unroll
  for (const auto& of_sub : reads) grad += of_sub[channel];
  for (int tile = 0; tile < tiles; ++tile) grad += passing[(slot.place * tiles + tile) * p.state_dim + channel];
#pragma unroll 8
  for (int row = 0; row < slot.rows; ++row) {
    const long long at = decay_at + row * decay_stride + channel;
    grad_decay[at] = cukit::has_gradient(log_decay[at]) ? grad : 0.0f;
    grad += chunk.cumsum[row * cukit::kChannelPitch + channel];
  }
}
