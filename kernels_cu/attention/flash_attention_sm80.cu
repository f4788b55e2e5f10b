// Exact attention, forward: out = softmax(scale * Q K^T + mask) V and the row-wise log-sum-exp. The
// score matrix is never written to global memory.
//
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691 (after Milakov and Gimelshein,
//   arXiv:1805.02867).
// Mapping: a block owns TILE_M queries of one head, a warp 16 * M_TILES of them with their outputs,
//   running maxima and sums in registers. It iterates over the keys and values in tiles of TILE_N,
//   last tile first, so that tiles partially masked by CAUSAL come first; the next tile is copied
//   while this one is multiplied. The grid is one-dimensional (block_order.cuh).
// A warp updates its running maxima only when a score exceeds its row's maximum by more than 8 in
// log2 units: softmax does not depend on the subtracted value, so most tiles need no rescaling.
// Score options: score_options.cuh. A query without a visible key gets out = 0, lse = -infinity.
// Shared memory, dynamic: 2 * (HEAD_DIM * (TILE_M + 2 * TILE_N) + VALUE_DIM * 2 * TILE_N) bytes,
//   Q | K, two stages | V, two; the epilogue reuses the space for 2 * TILE_M * VALUE_DIM
//   bytes of output.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|192|256 width of the tiles; PADDED 0|1
//   head_dim is smaller than HEAD_DIM (the rest is zeros); TILE_M = 16 * M_TILES * warps; M_TILES
//   1|2; TILE_N multiple of 16; THREADS; BLOCKS_PER_SM; Q_IN_REGISTERS 0|1; those of
//   score_options.cuh.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kKTiles = HEAD_DIM / 16;  // steps of Q K^T
constexpr int kSTiles = TILE_N / 8;     // column tiles of the scores
constexpr int kOTiles = VALUE_DIM / 8;  // column tiles of the output
constexpr int kWarpRows = 16 * M_TILES;
constexpr int kQueryBytes = TILE_M * HEAD_DIM * 2;
constexpr int kKeyBytes = TILE_N * HEAD_DIM * 2;
constexpr int kValueBytes = TILE_N * VALUE_DIM * 2;
constexpr float kLazyGrowth = 8.0f;  // in log2 units: probabilities are at most 256

static_assert(TILE_M == THREADS / cukit::kWarpSize * kWarpRows, "M_TILES row tiles per warp");
static_assert(TILE_N % 16 == 0, "steps of 16 keys");

using QueryCopy = cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
using KeyCopy = cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;
using ValueCopy = cukit::TileCopy<TILE_N, VALUE_DIM, THREADS, VALUE_PADDED>;
using QOperand = cukit::LeftMK<HEAD_DIM>;
using KOperand = cukit::RightNK<HEAD_DIM>;
using VOperand = cukit::RightKN<VALUE_DIM>;

// A warp's rows: accumulators and softmax state. Row r of a lane is row tile r / 2, half r % 2.
struct Rows {
  float out[M_TILES][kOTiles][4];
  float max[2 * M_TILES];
  float sum[2 * M_TILES];  // over this lane's columns; summed over the quad at the end
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

// If a score of the warp exceeds its row's maximum by more than kLazyGrowth, updates the warp's
// maxima and rescales its outputs and sums.
CUKIT_DEVICE void update_maxima(Rows& rows, const float (&scores)[M_TILES][kSTiles][4],
                               float scale_log2) {
  float seen[2 * M_TILES];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    seen[r] = rows.max[r];
#pragma unroll
    for (int n = 0; n < kSTiles; ++n) {
      seen[r] = fmaxf(seen[r], fmaxf(scores[r / 2][n][r % 2 * 2], scores[r / 2][n][r % 2 * 2 + 1]));
    }
    // If both are -infinity the difference is NaN, and the comparison false.
    grown |= (seen[r] - rows.max[r]) * scale_log2 > kLazyGrowth;
  }
  if (!__any_sync(cukit::kFullMask, grown)) return;
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

// out += exp2(scale * (scores - max)) V, sixteen keys at a time: one step's exponentials overlap
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

// Normalises the warp's outputs, stores them in the warp's rows of `tile` (shared memory) and,
// unless lse is null, their log-sum-exps to lse.
CUKIT_DEVICE void finish_rows(Rows& rows, unsigned char* tile, int warp_row, float scale_log2,
                              float* lse, long long first_statistic, int rows_left) {
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int row = warp_row + r * 8 + lane / 4;
    if (lse != nullptr && lane % 4 == 0 && row < rows_left) {
      lse[first_statistic + row] =
          sum == 0.0f ? -cukit::infinity() : (rows.max[r] * scale_log2 + log2f(sum)) * cukit::kLn2;
    }
#pragma unroll
    for (int n = 0; n < kOTiles; ++n) {
      const float* pair = &rows.out[r / 2][n][r % 2 * 2];
      *reinterpret_cast<unsigned*>(tile + cukit::Swizzle<VALUE_DIM>::offset(row, n) + lane % 4 * 4) =
          cukit::pack<T>(pair[0] * inverse, pair[1] * inverse);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_sm80(
    const T* __restrict__ q,   // [batch, seq_q, heads_q, head_dim]
    const T* __restrict__ k,   // [batch, seq_kv, heads_q / group, head_dim]
    const T* __restrict__ v,   // [batch, seq_kv, heads_q / group, value_dim]
    T* __restrict__ out,       // [batch, seq_q, heads_q, value_dim]
    float* __restrict__ lse,   // [batch, heads_q, seq_q]; VARLEN: [heads_q, total_q]; or null
    const float* __restrict__ alibi_slopes, const float* __restrict__ sinks,  // ScoreArrays
    const cukit::bias_t* __restrict__ bias, const unsigned char* __restrict__ mask,
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
    const __grid_constant__ cukit::ForwardParameters params) {
  const cukit::ScoreSettings& settings = params.settings;
  const float scale_log2 = params.scale_log2;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned q_tile = cukit::shared_address(shared);
  const unsigned k_tile = q_tile + kQueryBytes;
  const unsigned v_tile = k_tile + 2 * kKeyBytes;

  struct Place {
    int b, head, first_row;
    cukit::Sequence sequence;
  };
  const auto place_of = [&](int block) {
    const int q_tiles = (params.seq_q + TILE_M - 1) / TILE_M;
    const int heads = params.batch * params.heads_q;
    const cukit::HeadTile work = cukit::head_tile(block, heads, q_tiles, params.raster_group_heads);
    // Causal: the last queries have the most visible keys, so they go first.
    const int tile = CAUSAL ? q_tiles - 1 - work.tile : work.tile;
    const int b = work.head / params.heads_q;
    return Place{b, work.head % params.heads_q, tile * TILE_M,
                 cukit::sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv)};
  };
  const Place place = place_of(blockIdx.x);
  const cukit::Sequence& sequence = place.sequence;
  const int first_row = place.first_row;
  const int rows_left = sequence.seq_q - first_row;
  if (VARLEN && rows_left <= 0) return;
  const int key_head = place.head / params.group;
  q += cukit::offset_of(params.q, place.b, sequence.first_q + first_row, place.head);
  k += cukit::offset_of(params.k, place.b, sequence.first_kv, key_head);
  v += cukit::offset_of(params.v, place.b, sequence.first_kv, key_head);

  const cukit::ScoreArrays arrays{alibi_slopes, sinks, bias, mask};
  const cukit::HeadScores head(arrays, settings, place.b, place.head, sequence);
  const int seq_kv = sequence.seq_kv;
  const cukit::TileRange tiles = cukit::key_tiles<TILE_N>(
      first_row, min(TILE_M, rows_left), head.causal_offset, seq_kv, settings);

  const auto copy_keys = [&](int tile, int stage) {
    const int row = tile * TILE_N;
    const int keys = seq_kv - tile * TILE_N;
    KeyCopy::start(
        k_tile + stage * kKeyBytes, k + row * params.k.row, params.k.row, keys, params.head_dim);
    ValueCopy::start(
        v_tile + stage * kValueBytes, v + row * params.v.row, params.v.row, keys, params.value_dim);
    cukit::cp_async_commit();
  };

  QueryCopy::start(q_tile, q, params.q.row, rows_left, params.head_dim);
  if (tiles.end > tiles.begin) copy_keys(tiles.end - 1, 0);
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
    cukit::start_row(rows.max[r], rows.sum[r], arrays, place.head, scale_log2, lane % 4 == 0);
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

  const float factor = cukit::exponent_factor(scale_log2);
  const int lane_row = first_row + warp_row + lane / 4;
  int stage = 0;
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile, stage ^= 1) {
    cukit::cp_async_wait<0>();
    __syncthreads();  // this tile has been copied, and no warp reads the other stage any more
    if (tile > tiles.begin) copy_keys(tile - 1, stage ^ 1);

    float scores[M_TILES][kSTiles][4];
    multiply_keys(scores, q_operand, q_registers, k_operand, stage * kKeyBytes);
    const int lane_key = tile * TILE_N + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      cukit::apply_options(cukit::flat(scores[m]), {lane_row + 16 * m, lane_key}, head, scale_log2,
                           settings, tiles.unmasked(tile), tile * TILE_N + TILE_N > seq_kv);
    }
    update_maxima(rows, scores, factor);
    multiply_values(rows, scores, v_operand, stage * kValueBytes, factor);
  }

  // If there was no key tile, the copy of Q may still be in flight: wait before the output
  // overwrites Q. From here each warp accesses only its own rows.
  cukit::cp_async_wait<0>();
  __syncthreads();
  // Recomputed, to save registers in the loop.
  const Place again = place_of(cukit::opaque(blockIdx.x));
  const int rows_to_store = again.sequence.seq_q - again.first_row;
  const long long first_statistic =
      cukit::row_statistics(again.b, again.head, params.heads_q, again.sequence, settings) +
      again.first_row;
  finish_rows(rows, shared, warp_row, factor, lse, first_statistic, rows_to_store);
  __syncwarp();
  out += cukit::offset_of(params.out, again.b, again.sequence.first_q + again.first_row, again.head);
  cukit::store_tile<kWarpRows, VALUE_DIM, cukit::kWarpSize, VALUE_PADDED>(
      out, params.out.row, shared, warp_row, rows_to_store, params.value_dim, lane);
}
