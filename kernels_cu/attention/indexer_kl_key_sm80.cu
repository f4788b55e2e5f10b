// Gradient of an indexer's keys, from the derivatives with respect to its scores.
//
//   x = q k^T      dx = w dI [x > 0]      dk = scale sum over queries and heads of dx^T q
//
// indexer_kl_sweep (GRADIENT) has written dI of a chunk of queries, times kGradientUnit. `partial`
// accumulates the chunks in order, in float32.
// Paper: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556.
// Mapping: block (sequence, tile of keys, split of the heads); a warp owns 16 keys. The block
//   iterates over the chunk's queries in tiles of TILE_Q and for each tile over the block's heads;
//   the next head's queries are copied meanwhile, and dI once for all heads. dx^T is a register
//   operand of its product.
// Shared memory, bytes, dynamic: 2 (HEAD_DIM (KEY_TILE + 2 TILE_Q) + 2 TILE_Q KEY_TILE):
//   k | q, two stages | dI, two.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED; KEY_TILE = 16 * warps; TILE_Q
//   multiple of 16 that divides TILE_M, the queries of a tile of the chunk; THREADS; BLOCKS_PER_SM;
//   CAUSAL, VARLEN of score_options.cuh.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/indexer_kl.py.
#include "attention/indexer_work.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kKeyBytes = KEY_TILE * HEAD_DIM * 2;
constexpr int kQueryBytes = TILE_Q * HEAD_DIM * 2;
constexpr int kDerivativeBytes = TILE_Q * KEY_TILE * 2;
constexpr int kParts = TILE_M / TILE_Q;

static_assert(KEY_TILE == THREADS / cukit::kWarpSize * 16, "each warp owns 16 keys");
static_assert(TILE_M % TILE_Q == 0, "TILE_Q divides a tile of the chunk");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) indexer_kl_key_sm80(
    const T* __restrict__ q,                 // [batch, seq_q, heads_s, head_dim]
    const T* __restrict__ k,                 // [batch, seq_kv, head_dim]
    const float* __restrict__ head_weights,  // [batch, heads_s, seq_q]; VARLEN: [heads_s, total_q]
    const T* __restrict__ derivatives,       // [chunk rows, scratch_row]
    float* __restrict__ partial,             // [batch * seq_kv, splits, head_dim]
    const float* __restrict__ upstream,      // scalar or null (1): factor of dk
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,   // [batch + 1]
    const __grid_constant__ cukit::IndexerParameters params, int first_tile) {
  const cukit::ScoreSettings& settings = params.settings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const int split = static_cast<int>(blockIdx.x) % params.splits;
  const int index = static_cast<int>(blockIdx.x) / params.splits;
  const int key_tiles = (params.seq_kv + KEY_TILE - 1) / KEY_TILE;
  const int b = index / key_tiles;
  const int first_key = index % key_tiles * KEY_TILE;
  const cukit::Sequence sequence =
      cukit::sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv);
  const int keys_left = sequence.seq_kv - first_key;
  if (keys_left <= 0) return;
  const int causal_offset = sequence.seq_kv - sequence.seq_q;

  // The chunk's tiles of this sequence with queries that attend to some of the block's keys.
  const int q_tiles = cukit::tiles_of_sequence(params);
  const cukit::TileRange visible = cukit::query_tiles<TILE_M>(
      first_key, min(KEY_TILE, keys_left), causal_offset, sequence.seq_q, settings);
  const long long before = static_cast<long long>(b) * q_tiles - first_tile;
  const long long begin = max(static_cast<long long>(visible.begin), -before);
  const long long end = min(static_cast<long long>(visible.end), params.chunk_tiles - before);
  const bool first_chunk = first_tile == 0;
  if (begin >= end && !first_chunk) return;

  const int first_head = params.heads_s * split / params.splits;
  const int heads = params.heads_s * (split + 1) / params.splits - first_head;
  const int warp_key = static_cast<int>(threadIdx.x) / cukit::kWarpSize * 16;
  const int lane = static_cast<int>(threadIdx.x) % cukit::kWarpSize;
  const unsigned k_tile = cukit::shared_address(shared);
  const unsigned q_tile = k_tile + kKeyBytes;
  const unsigned d_tile = q_tile + 2 * kQueryBytes;
  const auto rows_left = [&](int part) {  // part: index of TILE_Q queries of the sequence
    return sequence.seq_q - part * TILE_Q;
  };
  const auto copy = [&](int part, int head, int q_stage, int d_stage) {
    cukit::TileCopy<TILE_Q, HEAD_DIM, THREADS, PADDED>::start(
        q_tile + q_stage * kQueryBytes,
        q + cukit::offset_of(params.q_s, b, sequence.first_q + part * TILE_Q, first_head + head),
        params.q_s.row, rows_left(part), params.head_dim);
    if (head == 0) {
      const long long row = before * TILE_M + static_cast<long long>(part) * TILE_Q;
      cukit::TileCopy<TILE_Q, KEY_TILE, THREADS, false>::start(
          d_tile + d_stage * kDerivativeBytes, derivatives + row * params.scratch_row + first_key,
          params.scratch_row, TILE_Q, KEY_TILE);
    }
    cukit::cp_async_commit();
  };
  const int first_part = static_cast<int>(begin) * kParts;
  const int end_part = min(static_cast<int>(end) * kParts, (sequence.seq_q + TILE_Q - 1) / TILE_Q);
  const bool any = begin < end && first_part < end_part;
  cukit::TileCopy<KEY_TILE, HEAD_DIM, THREADS, PADDED>::start(
      k_tile, k + cukit::offset_of(params.k_s, b, sequence.first_kv + first_key, 0), params.k_s.row,
      keys_left, params.head_dim);
  if (any) copy(first_part, 0, 0, 0);
  cukit::cp_async_commit();

  const cukit::LeftMK<HEAD_DIM> k_left(k_tile, warp_key, 0);
  const cukit::RightNK<HEAD_DIM> q_first(q_tile, 0, 0);
  const cukit::RightKN<HEAD_DIM> q_again(q_tile, 0, 0);
  const cukit::LeftKM<KEY_TILE, 16> d_left(d_tile, 0, warp_key);
  const long long first_weight =
      cukit::row_statistics(b, first_head, params.heads_s, sequence, settings);
  const long long rows_of_head = VARLEN ? settings.total_q : sequence.seq_q;
  float dk[1][HEAD_DIM / 8][4];
  cukit::clear(dk);
  int q_stage = 0, d_stage = 0;
#pragma unroll 1
  for (int part = first_part; any && part < end_part; ++part) {
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
      cukit::cp_async_wait<0>();
      __syncthreads();  // the queries have been copied, and no warp reads the other stages any more
      const bool same = head + 1 < heads;
      if (same || part + 1 < end_part) {
        copy(same ? part : part + 1, same ? head + 1 : 0, q_stage ^ 1, d_stage ^ 1);
      }
      // The lane's queries are 8 n + 2 (lane % 4) + i.
      const float* weights = head_weights + first_weight + head * rows_of_head + part * TILE_Q;
      const int left = rows_left(part);
      float x[1][TILE_Q / 8][4];
      cukit::clear(x);
      cukit::warp_product<T, HEAD_DIM / 16>(
          x, [&](unsigned(&r)[4], int, int step) { k_left(r, 0, 16 * step); },
          [&](unsigned(&r)[4], int n, int step) {
            q_first(r, 8 * n, 16 * step, q_stage * kQueryBytes);
          });
      unsigned dx[TILE_Q / 16][4];
#pragma unroll
      for (int step = 0; step < TILE_Q / 16; ++step) {
        unsigned packed[4];
        d_left(packed, 16 * step, 0, d_stage * kDerivativeBytes);
        float weight[2][2];  // [0]: for the queries of registers 0 and 1; [1]: 2 and 3
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int query = 16 * step + 8 * side + lane % 4 * 2 + i;
            weight[side][i] = query < left ? weights[query] : 0.0f;
          }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float d[2];
          cukit::unpack<T>(d, packed[j]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float own = x[0][2 * step + j / 2][j % 2 * 2 + i];
            const bool counts = own > 0.0f && d[i] != 0.0f;
            d[i] = counts ? d[i] * weight[j / 2][i] : 0.0f;
          }
          dx[step][j] = cukit::pack<T>(d[0], d[1]);
        }
      }
      cukit::warp_product<T, TILE_Q / 16>(
          dk,
          [&](unsigned(&r)[4], int, int step) {
#pragma unroll
            for (int j = 0; j < 4; ++j) r[j] = dx[step][j];
          },
          [&](unsigned(&r)[4], int n, int step) {
            q_again(r, 16 * step, 8 * n, q_stage * kQueryBytes);
          });
      q_stage ^= 1;
      if (!same) d_stage ^= 1;
    }
  }
  cukit::cp_async_wait<0>();
  __syncthreads();

  const float scale = upstream != nullptr ? params.grad_scale * *upstream : params.grad_scale;
  const long long first =
      (VARLEN ? 0 : static_cast<long long>(b) * params.seq_kv) + sequence.first_kv + first_key;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = warp_key + lane / 4 + 8 * half;
    if (key >= keys_left) continue;
    float* to = partial + ((first + key) * params.splits + split) * params.head_dim;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (PADDED && column >= params.head_dim) continue;
      float2* pair = reinterpret_cast<float2*>(to + column);
      const float2 sum = first_chunk ? make_float2(0.0f, 0.0f) : *pair;
      *pair = make_float2(fmaf(dk[0][n][2 * half], scale, sum.x),
                          fmaf(dk[0][n][2 * half + 1], scale, sum.y));
    }
  }
}
