// Exact attention, forward: out = softmax(scale * Q K^T + mask) V and its row-wise log-sum-exp,
// without the score matrix ever leaving the chip.
//
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691 (after Milakov and Gimelshein, arXiv:1805.02867).
// Mapping: a block owns TILE_M queries of one head, a warp 16 * M_TILES of them with their outputs,
//   running maxima and sums in registers. It walks over the keys and values in tiles of TILE_N, last
//   tile first, so that the tiles that need a mask come first; the next tile is copied while this
//   one is multiplied. The grid is one-dimensional: see block_order.cuh.
// Maxima are renewed only when one has grown by more than 2^8: softmax does not depend on the
//   subtracted value, and most tiles then rescale nothing.
// Causal masks are aligned bottom right: key j is visible to query i iff j <= seq_kv - seq_q + i.
//   A query that sees no key gets out = 0 and lse = -infinity.
// Shared memory: (TILE_M + 2 * 2 * TILE_N) * HEAD_DIM * 2 bytes, dynamic: Q | K, two stages | V, two.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256 width of the tiles; PADDED 0|1 head_dim is
//   smaller than HEAD_DIM (the rest is zeros); TILE_M = 16 * M_TILES * warps; M_TILES 1|2;
//   TILE_N multiple of 16; THREADS; BLOCKS_PER_SM; CAUSAL 0|1; Q_IN_REGISTERS 0|1.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kKTiles = HEAD_DIM / 16;  // steps of Q K^T
constexpr int kSTiles = TILE_N / 8;     // column tiles of the scores
constexpr int kOTiles = HEAD_DIM / 8;   // column tiles of the output
constexpr int kWarpRows = 16 * M_TILES;
constexpr int kQueryBytes = TILE_M * HEAD_DIM * 2;
constexpr int kKeyBytes = TILE_N * HEAD_DIM * 2;
constexpr float kLazyGrowth = 8.0f;  // in powers of two: probabilities stay below 256
constexpr float kLn2 = 0.6931471805599453f;

static_assert(TILE_M == THREADS / cukit::kWarpSize * kWarpRows, "every warp owns M_TILES row tiles");
static_assert(TILE_N % 16 == 0, "keys come in steps of 16");

using QueryCopy = cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
using KeyCopy = cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;
using QOperand = cukit::LeftMK<HEAD_DIM>;
using KOperand = cukit::RightNK<HEAD_DIM>;
using VOperand = cukit::RightKN<HEAD_DIM>;

// A warp's rows: what has been summed up so far. Row r of a lane is row tile r / 2, half r % 2.
struct Rows {
  float out[M_TILES][kOTiles][4];
  float max[2 * M_TILES];
  float sum[2 * M_TILES];  // over this lane's columns; the quad is summed at the end
};

// scores = Q K^T
CUKIT_DEVICE void multiply_keys(float (&scores)[M_TILES][kSTiles][4], const QOperand& q,
                                const unsigned (&q_registers)[Q_IN_REGISTERS ? kKTiles : 1][M_TILES][4],
                                const KOperand& k, int stage_bytes) {
  cukit::clear(scores);
  cukit::warp_product<T, kKTiles>(
      scores,
      [&](unsigned(&r)[4], int m, int step) {
        if constexpr (Q_IN_REGISTERS) {
#pragma unroll
          for (int i = 0; i < 4; ++i) r[i] = q_registers[step][m][i];
        } else {
          q(r, 16 * m, 16 * step);
        }
      },
      [&](unsigned(&r)[4], int n, int step) { k(r, 8 * n, 16 * step, stage_bytes); });
}

// -infinity where the key is beyond the last or, causal, in the query's future. `first_key` and
// `last_visible` are relative to the tile's first key and to this lane's first row.
CUKIT_DEVICE void mask_scores(float (&scores)[M_TILES][kSTiles][4], int keys, int last_visible) {
  const int lane_column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = CAUSAL ? min(keys, last_visible + 1 + 16 * m + 8 * half) : keys;
#pragma unroll
      for (int n = 0; n < kSTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * n + lane_column + i >= end) scores[m][n][2 * half + i] = -cukit::infinity();
        }
    }
}

// Renews the maxima where a row has outgrown its own, and rescales what was summed under them.
CUKIT_DEVICE void renew_maxima(Rows& rows, const float (&scores)[M_TILES][kSTiles][4],
                               float scale_log2) {
  float seen[2 * M_TILES];
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    seen[r] = rows.max[r];
#pragma unroll
    for (int n = 0; n < kSTiles; ++n) {
      seen[r] = fmaxf(seen[r], fmaxf(scores[r / 2][n][r % 2 * 2], scores[r / 2][n][r % 2 * 2 + 1]));
    }
    // Still -infinity on both sides gives NaN, which is not greater.
    outgrown |= (seen[r] - rows.max[r]) * scale_log2 > kLazyGrowth;
  }
  if (!__any_sync(cukit::kFullMask, outgrown)) return;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    seen[r] = fmaxf(seen[r], __shfl_xor_sync(cukit::kFullMask, seen[r], 1));
    seen[r] = fmaxf(seen[r], __shfl_xor_sync(cukit::kFullMask, seen[r], 2));
    const float base = seen[r] == -cukit::infinity() ? 0.0f : seen[r];
    const float shrink = exp2f((rows.max[r] - base) * scale_log2);
    rows.max[r] = seen[r];
    rows.sum[r] *= shrink;
#pragma unroll
    for (int n = 0; n < kOTiles; ++n) {
      rows.out[r / 2][n][r % 2 * 2] *= shrink;
      rows.out[r / 2][n][r % 2 * 2 + 1] *= shrink;
    }
  }
}

// out += exp2(scale * (scores - max)) V, sixteen keys at a time: one step's exponentials run beside
// the products of the step before.
CUKIT_DEVICE void multiply_values(Rows& rows, const float (&scores)[M_TILES][kSTiles][4],
                                  const VOperand& v, int stage_bytes, float scale_log2) {
  float shift[2 * M_TILES];
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    shift[r] = rows.max[r] == -cukit::infinity() ? 0.0f : -rows.max[r] * scale_log2;
  }
#pragma unroll
  for (int step = 0; step < TILE_N / 16; ++step) {
    unsigned p[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* pair = &scores[m][2 * step + n][2 * half];
          const float low = exp2f(fmaf(pair[0], scale_log2, shift[2 * m + half]));
          const float high = exp2f(fmaf(pair[1], scale_log2, shift[2 * m + half]));
          rows.sum[2 * m + half] += low + high;
          p[m][2 * n + half] = cukit::pack<T>(low, high);
        }
    cukit::warp_product<T, 1>(
        rows.out,
        [&](unsigned(&r)[4], int m, int) {
#pragma unroll
          for (int i = 0; i < 4; ++i) r[i] = p[m][i];
        },
        [&](unsigned(&r)[4], int n, int) { v(r, 16 * step, 8 * n, stage_bytes); });
  }
}

// Divides by the sums, leaves the warp's rows in its part of the query tile and returns lse.
CUKIT_DEVICE void finish_rows(Rows& rows, unsigned char* tile, int warp_row, float scale_log2,
                              float* lse, int rows_left) {
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int row = warp_row + r * 8 + lane / 4;
    if (lane % 4 == 0 && row < rows_left) {
      lse[row] = sum == 0.0f ? -cukit::infinity() : (rows.max[r] * scale_log2 + log2f(sum)) * kLn2;
    }
#pragma unroll
    for (int n = 0; n < kOTiles; ++n) {
      const float* pair = &rows.out[r / 2][n][r % 2 * 2];
      *reinterpret_cast<unsigned*>(tile + cukit::Swizzle<HEAD_DIM>::offset(row, n) + lane % 4 * 4) =
          cukit::pack<T>(pair[0] * inverse, pair[1] * inverse);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_sm80(
    const T* __restrict__ q,   // [batch, seq_q, heads_q, head_dim]
    const T* __restrict__ k,   // [batch, seq_kv, heads_q / group, head_dim]
    const T* __restrict__ v,   // as k
    T* __restrict__ out,       // as q
    float* __restrict__ lse,   // [batch, heads_q, seq_q]
    long long q_batch, long long q_row, long long q_head,  // strides in elements
    long long k_batch, long long k_row, long long k_head,
    long long v_batch, long long v_row, long long v_head,
    long long out_batch, long long out_row, long long out_head,
    int batch, int heads_q, int group, int seq_q, int seq_kv, int head_dim, int section,
    float scale_log2) {  // scale * log2(e)
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned q_tile = cukit::shared_address(shared);
  const unsigned k_tile = q_tile + kQueryBytes;
  const unsigned v_tile = k_tile + 2 * kKeyBytes;

  struct Place {
    int batch_head, b, head, first_row;
  };
  const auto place_of = [&](int block) {
    const int q_tiles = (seq_q + TILE_M - 1) / TILE_M;
    const cukit::HeadTile work = cukit::head_tile(block, batch * heads_q, q_tiles, section);
    // Causal: the last queries see the most keys, so they go first.
    const int tile = CAUSAL ? q_tiles - 1 - work.tile : work.tile;
    return Place{work.head, work.head / heads_q, work.head % heads_q, tile * TILE_M};
  };
  const Place place = place_of(blockIdx.x);
  const int first_row = place.first_row;
  const int rows_left = seq_q - first_row;
  q += place.b * q_batch + place.head * q_head + first_row * q_row;
  k += place.b * k_batch + place.head / group * k_head;
  v += place.b * v_batch + place.head / group * v_head;

  // Keys that the last and the first query of the tile see.
  const int past = seq_kv - seq_q + first_row + 1;
  const int most_keys = CAUSAL ? min(seq_kv, past + min(TILE_M, rows_left) - 1) : seq_kv;
  const int least_keys = CAUSAL ? max(0, min(seq_kv, past)) : seq_kv;
  const int kv_tiles = (max(0, most_keys) + TILE_N - 1) / TILE_N;
  const int unmasked_tiles = least_keys / TILE_N;

  const auto copy_keys = [&](int tile, int stage) {
    const long long row = static_cast<long long>(tile) * TILE_N;
    const int keys = seq_kv - tile * TILE_N;
    KeyCopy::start(
        k_tile + stage * kKeyBytes, k + row * k_row, k_row, keys, head_dim);
    KeyCopy::start(
        v_tile + stage * kKeyBytes, v + row * v_row, v_row, keys, head_dim);
    cukit::cp_async_commit();
  };

  QueryCopy::start(q_tile, q, q_row, rows_left, head_dim);
  if (kv_tiles > 0) copy_keys(kv_tiles - 1, 0);
  cukit::cp_async_commit();

  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp_row = static_cast<int>(threadIdx.x) / cukit::kWarpSize * kWarpRows;
  const QOperand q_operand(q_tile, warp_row, 0);
  const KOperand k_operand(k_tile, 0, 0);
  const VOperand v_operand(v_tile, 0, 0);

  Rows rows;
  cukit::clear(rows.out);
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    rows.max[r] = -cukit::infinity();
    rows.sum[r] = 0.0f;
  }

  unsigned q_registers[Q_IN_REGISTERS ? kKTiles : 1][M_TILES][4];
  if constexpr (Q_IN_REGISTERS) {
    cukit::cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kKTiles; ++step)
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) q_operand(q_registers[step][m], 16 * m, 16 * step);
  }

  int stage = 0;
  for (int tile = kv_tiles - 1; tile >= 0; --tile, stage ^= 1) {
    cukit::cp_async_wait<0>();
    __syncthreads();  // this tile has landed, and nobody reads the other stage any more
    if (tile > 0) copy_keys(tile - 1, stage ^ 1);

    const int stage_bytes = stage * kKeyBytes;
    float scores[M_TILES][kSTiles][4];
    multiply_keys(scores, q_operand, q_registers, k_operand, stage_bytes);
    if (tile >= unmasked_tiles) {
      const int first_key = tile * TILE_N;
      mask_scores(scores, seq_kv - first_key, past - 1 - first_key + warp_row + lane / 4);
    }
    renew_maxima(rows, scores, scale_log2);
    multiply_values(rows, scores, v_operand, stage_bytes, scale_log2);
  }

  // Copies of a tile without keys may still be on their way; a warp reads and writes its own rows.
  cukit::cp_async_wait<0>();
  __syncthreads();
  const Place again = place_of(cukit::opaque(blockIdx.x));
  const int rows_to_store = seq_q - again.first_row;
  lse += static_cast<long long>(again.batch_head) * seq_q + again.first_row;
  finish_rows(rows, shared, warp_row, scale_log2, lse, rows_to_store);
  __syncwarp();
  out += again.b * out_batch + again.head * out_head + again.first_row * out_row;
  cukit::store_tile<kWarpRows, HEAD_DIM, cukit::kWarpSize, PADDED>(
      out, out_row, shared, warp_row, rows_to_store, head_dim, lane);
}
