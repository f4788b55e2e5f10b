// Gradient of the queries of exact attention, summed in a fixed order.
//
//   P = exp(scale * Q K^T - lse)      dS = P * (dO V^T - delta)      dQ = scale * dS K
//
// Options of the scores (score_options.cuh) change P as in the forward; dS also takes the slope of a
// softcap.
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with queries outside and keys inside:
//   two products more than flash_attention_backward_sm80.cu, and no atomics.
// Mapping: a block owns TILE_M queries of one head, a warp 16 of them. It walks over the keys and
//   values in tiles of TILE_N; the next tile is copied while this one is multiplied. dS feeds its
//   product from registers.
// Shared memory, bytes: 2 (HEAD_DIM + VALUE_DIM) (TILE_M + 2 TILE_N), dynamic:
//   Q | dO | K, two stages | V, two.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than HEAD_DIM;
//   TILE_M = 16 * warps; TILE_N multiple of 16; THREADS; BLOCKS_PER_SM; those of score_options.cuh
//   and scratch_rows.cuh.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "attention/parameters.cuh"
#include "attention/query_rows.cuh"
#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kQueryBytes = TILE_M * HEAD_DIM * 2;
constexpr int kGradOutBytes = TILE_M * VALUE_DIM * 2;
constexpr int kKeyBytes = TILE_N * HEAD_DIM * 2;
constexpr int kValueBytes = TILE_N * VALUE_DIM * 2;

static_assert(TILE_M == THREADS / cukit::kWarpSize * 16, "every warp owns 16 rows");

using QueryCopy = cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
using GradOutCopy = cukit::TileCopy<TILE_M, VALUE_DIM, THREADS, VALUE_PADDED>;
using KeyCopy = cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;
using ValueCopy = cukit::TileCopy<TILE_N, VALUE_DIM, THREADS, VALUE_PADDED>;

// scores = rows * columns^T over Width: both stored with it contiguous.
template <int Width>
CUKIT_DEVICE void multiply(float (&scores)[1][TILE_N / 8][4], const cukit::LeftMK<Width>& rows,
                           const cukit::RightNK<Width>& columns) {
  cukit::clear(scores);
  cukit::warp_product<T, Width / 16>(
      scores, [&](unsigned(&r)[4], int, int step) { rows(r, 0, 16 * step); },
      [&](unsigned(&r)[4], int n, int step) { columns(r, 8 * n, 16 * step); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_attention_backward_query_sm80(
        const T* __restrict__ q,         // [batch, seq_q, heads_q, head_dim]
        const T* __restrict__ k,         // [batch, seq_kv, heads_q / group, head_dim]
        const T* __restrict__ v,         // [batch, seq_kv, heads_q / group, value_dim]
        const T* __restrict__ grad_out,  // [batch, seq_q, heads_q, value_dim]
        const float* __restrict__ lse_log2,  // scratch rows
        const float* __restrict__ delta,     // scratch rows
        T* __restrict__ grad_q,          // [batch, seq_q, heads_q, head_dim], contiguous
        const float* __restrict__ alibi_slopes, const float* __restrict__ sinks,  // ScoreArrays
        const cukit::bias_t* __restrict__ bias, const unsigned char* __restrict__ mask,
        const int* __restrict__ cu_seqlens_q,   // [batch + 1]
        const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
        const __grid_constant__ cukit::QueryGradientParameters params) {
  const cukit::ScoreSettings& settings = params.settings;
  const float scale_log2 = params.scale_log2;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned q_tile = cukit::shared_address(shared);
  const unsigned grad_out_tile = q_tile + kQueryBytes;
  const unsigned k_tile = grad_out_tile + kGradOutBytes;
  const unsigned v_tile = k_tile + 2 * kKeyBytes;

  const int q_tiles = (params.seq_q + TILE_M - 1) / TILE_M;
  const cukit::HeadTile work =
      cukit::head_tile(blockIdx.x, params.batch * params.heads_q, q_tiles, params.section);
  const int b = work.head / params.heads_q;
  const int head = work.head % params.heads_q;
  const cukit::Sequence sequence =
      cukit::sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv);
  // Causal: the last queries see the most keys, so they go first.
  const int first_row = (CAUSAL ? q_tiles - 1 - work.tile : work.tile) * TILE_M;
  const int rows_left = sequence.seq_q - first_row;
  if (VARLEN && rows_left <= 0) return;
  const int row_of_q = sequence.first_q + first_row;
  q += cukit::offset_of(params.q, b, row_of_q, head);
  grad_out += cukit::offset_of(params.grad_out, b, row_of_q, head);
  k += cukit::offset_of(params.k, b, sequence.first_kv, head / params.group);
  v += cukit::offset_of(params.v, b, sequence.first_kv, head / params.group);

  const cukit::HeadScores options({alibi_slopes, sinks, bias, mask}, settings, b, head, sequence);
  const int seq_kv = sequence.seq_kv;
  const cukit::TileRange tiles = cukit::key_tiles<TILE_N>(
      first_row, min(TILE_M, rows_left), options.past, seq_kv, settings);

  const auto copy_keys = [&](int tile, int stage) {
    const int key = tile * TILE_N;
    KeyCopy::start(k_tile + stage * kKeyBytes, k + key * params.k.row, params.k.row, seq_kv - key,
                   params.head_dim);
    ValueCopy::start(v_tile + stage * kValueBytes, v + key * params.v.row, params.v.row,
                     seq_kv - key, params.value_dim);
    cukit::cp_async_commit();
  };
  QueryCopy::start(q_tile, q, params.q.row, rows_left, params.head_dim);
  GradOutCopy::start(grad_out_tile, grad_out, params.grad_out.row, rows_left, params.value_dim);
  if (tiles.end > tiles.begin) copy_keys(tiles.begin, 0);
  cukit::cp_async_commit();

  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp_row = static_cast<int>(threadIdx.x) / cukit::kWarpSize * 16;
  const cukit::LeftMK<HEAD_DIM> q_left(q_tile, warp_row, 0);
  const cukit::LeftMK<VALUE_DIM> do_left(grad_out_tile, warp_row, 0);
  const cukit::RightNK<HEAD_DIM> k_right(k_tile, 0, 0);
  const cukit::RightNK<VALUE_DIM> v_right(v_tile, 0, 0);
  const cukit::RightKN<HEAD_DIM> k_again(k_tile, 0, 0);

  const int lane_row = first_row + warp_row + lane / 4;
  const cukit::QueryRows rows(
      options, settings, scale_log2, lse_log2, delta,
      cukit::scratch_row(b, head, params.heads_q, params.rows_per_head, sequence.first_q), lane_row);

  float dq[1][HEAD_DIM / 8][4];
  cukit::clear(dq);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    cukit::cp_async_wait<0>();
    __syncthreads();  // this tile has landed, and nobody reads the other stage any more
    const int stage = (tile - tiles.begin) % 2;
    if (tile + 1 < tiles.end) copy_keys(tile + 1, stage ^ 1);
    const auto at_stage = [&](auto operand, int bytes) {
      operand.address += stage * bytes;
      return operand;
    };

    const cukit::FragmentPlace at{lane_row, tile * TILE_N + lane % 4 * 2};
    const bool whole = tiles.whole(tile);
    float p[1][TILE_N / 8][4], dp[1][TILE_N / 8][4];
    multiply<HEAD_DIM>(p, q_left, at_stage(k_right, kKeyBytes));
    rows.weigh(cukit::flat(p[0]), at, whole, tile * TILE_N + TILE_N > seq_kv);
    multiply<VALUE_DIM>(dp, do_left, at_stage(v_right, kValueBytes));
    const auto keys = at_stage(k_again, kKeyBytes);
    const auto score_gradient = [&](int e) {
      return rows.gradient(cukit::flat(p[0])[e], cukit::flat(dp[0])[e], e);
    };
#pragma unroll
    for (int step = 0; step < TILE_N / 16; ++step) {
      unsigned ds[4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int e = 4 * (2 * step + n) + 2 * half;
          ds[2 * n + half] = cukit::pack<T>(score_gradient(e), score_gradient(e + 1));
        }
      cukit::warp_product<T, 1>(
          dq,
          [&](unsigned(&r)[4], int, int) {
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = ds[i];
          },
          [&](unsigned(&r)[4], int n, int) { keys(r, 16 * step, 8 * n); });
    }
  }

  cukit::cp_async_wait<0>();
  __syncthreads();  // a warp writes and stores its own rows of the query tile
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const int row = warp_row + 8 * half + lane / 4;
      *reinterpret_cast<unsigned*>(shared + cukit::Swizzle<HEAD_DIM>::offset(row, n) +
                                   lane % 4 * 4) =
          cukit::pack<T>(dq[0][n][2 * half] * params.scale, dq[0][n][2 * half + 1] * params.scale);
    }
  __syncwarp();
  const long long row_stride = static_cast<long long>(params.heads_q) * params.head_dim;
  const long long first = VARLEN ? 0 : static_cast<long long>(b) * params.seq_q;
  T* to = grad_q + (first + row_of_q) * row_stride + head * params.head_dim;
  cukit::store_tile<16, HEAD_DIM, cukit::kWarpSize, PADDED>(to, row_stride, shared, warp_row,
                                                            rows_left, params.head_dim, lane);
}
