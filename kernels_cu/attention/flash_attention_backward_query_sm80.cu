// Gradient of the queries of exact attention, summed in a fixed order.
//
//   P = exp(scale * Q K^T - lse)      dS = P * (dO V^T - delta)      dQ = scale * dS K
//
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with queries outside and keys inside:
//   two products more than flash_attention_backward_sm80.cu, and no atomics.
// Mapping: a block owns TILE_M queries of one head, a warp 16 of them. It walks over the keys and
//   values in tiles of TILE_N; the next tile is copied while this one is multiplied. dS feeds its
//   product from registers.
// Shared memory, bytes: 2 HEAD_DIM (2 TILE_M + 2 * 2 TILE_N), dynamic: Q | dO | K, two stages | V, two.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than HEAD_DIM;
//   TILE_M = 16 * warps; TILE_N multiple of 16; THREADS; BLOCKS_PER_SM; CAUSAL 0|1.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kTileBytesM = TILE_M * HEAD_DIM * 2;
constexpr int kTileBytesN = TILE_N * HEAD_DIM * 2;

static_assert(TILE_M == THREADS / cukit::kWarpSize * 16, "every warp owns 16 rows");

using QueryCopy = cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
using KeyCopy = cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;

// scores = rows * columns^T over head_dim: both stored with head_dim contiguous.
CUKIT_DEVICE void multiply(float (&scores)[1][TILE_N / 8][4], const cukit::LeftMK<HEAD_DIM>& rows,
                           const cukit::RightNK<HEAD_DIM>& columns) {
  cukit::clear(scores);
  cukit::warp_product<T, HEAD_DIM / 16>(
      scores, [&](unsigned(&r)[4], int, int step) { rows(r, 0, 16 * step); },
      [&](unsigned(&r)[4], int n, int step) { columns(r, 8 * n, 16 * step); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_attention_backward_query_sm80(
        const T* __restrict__ q,         // [batch, seq_q, heads_q, head_dim]
        const T* __restrict__ k,         // [batch, seq_kv, heads_q / group, head_dim]
        const T* __restrict__ v,         // as k
        const T* __restrict__ grad_out,  // as q
        const float* __restrict__ lse_log2,  // [batch * heads_q, seq_q_padded]
        const float* __restrict__ delta,     // as lse_log2
        T* __restrict__ grad_q,          // [batch, seq_q, heads_q, head_dim], contiguous
        long long q_batch, long long q_row, long long q_head,  // strides in elements
        long long k_batch, long long k_row, long long k_head,
        long long v_batch, long long v_row, long long v_head,
        long long grad_out_batch, long long grad_out_row, long long grad_out_head,
        int batch, int heads_q, int group, int seq_q, int seq_kv, int seq_q_padded, int head_dim,
        int section, float scale, float scale_log2) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned q_tile = cukit::shared_address(shared);
  const unsigned grad_out_tile = q_tile + kTileBytesM;
  const unsigned k_tile = grad_out_tile + kTileBytesM;
  const unsigned v_tile = k_tile + 2 * kTileBytesN;

  const int q_tiles = (seq_q + TILE_M - 1) / TILE_M;
  const cukit::HeadTile work = cukit::head_tile(blockIdx.x, batch * heads_q, q_tiles, section);
  const int b = work.head / heads_q;
  const int head = work.head % heads_q;
  // Causal: the last queries see the most keys, so they go first.
  const int first_row = (CAUSAL ? q_tiles - 1 - work.tile : work.tile) * TILE_M;
  const int rows_left = seq_q - first_row;
  q += b * q_batch + head * q_head + first_row * q_row;
  grad_out += b * grad_out_batch + head * grad_out_head + first_row * grad_out_row;
  k += b * k_batch + head / group * k_head;
  v += b * v_batch + head / group * v_head;

  const int past = seq_kv - seq_q + first_row;  // row i of the tile sees keys up to i + past
  const int most_keys = CAUSAL ? min(seq_kv, past + min(TILE_M, rows_left)) : seq_kv;
  const int least_keys = CAUSAL ? max(0, min(seq_kv, past + 1)) : seq_kv;
  const int kv_tiles = (max(0, most_keys) + TILE_N - 1) / TILE_N;
  const int unmasked_tiles = least_keys / TILE_N;

  const auto copy_keys = [&](int tile, int stage) {
    const int key = tile * TILE_N;
    KeyCopy::start(k_tile + stage * kTileBytesN, k + key * k_row, k_row, seq_kv - key, head_dim);
    KeyCopy::start(v_tile + stage * kTileBytesN, v + key * v_row, v_row, seq_kv - key, head_dim);
    cukit::cp_async_commit();
  };
  QueryCopy::start(q_tile, q, q_row, rows_left, head_dim);
  QueryCopy::start(grad_out_tile, grad_out, grad_out_row, rows_left, head_dim);
  if (kv_tiles > 0) copy_keys(0, 0);
  cukit::cp_async_commit();

  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp_row = static_cast<int>(threadIdx.x) / cukit::kWarpSize * 16;
  const cukit::LeftMK<HEAD_DIM> q_left(q_tile, warp_row, 0), do_left(grad_out_tile, warp_row, 0);
  cukit::RightNK<HEAD_DIM> k_right(k_tile, 0, 0), v_right(v_tile, 0, 0);
  cukit::RightKN<HEAD_DIM> k_again(k_tile, 0, 0);

  float row_lse[2], row_delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane / 4;
    const long long at = static_cast<long long>(work.head) * seq_q_padded + first_row + row;
    row_lse[half] = row < rows_left ? lse_log2[at] : cukit::infinity();
    row_delta[half] = row < rows_left ? delta[at] : 0.0f;
  }

  float dq[1][HEAD_DIM / 8][4];
  cukit::clear(dq);
  for (int tile = 0; tile < kv_tiles; ++tile) {
    cukit::cp_async_wait<0>();
    __syncthreads();  // this tile has landed, and nobody reads the other stage any more
    const int stage = tile % 2;
    if (tile + 1 < kv_tiles) copy_keys(tile + 1, stage ^ 1);
    const auto at_stage = [&](auto operand) {
      operand.address += stage * kTileBytesN;
      return operand;
    };

    float p[1][TILE_N / 8][4], dp[1][TILE_N / 8][4];
    multiply(p, q_left, at_stage(k_right));
    if (tile >= unmasked_tiles) {
      const int keys = seq_kv - tile * TILE_N;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int seen = past + warp_row + i / 2 * 8 + lane / 4 + 1 - tile * TILE_N;
        const int end = CAUSAL ? min(keys, seen) : keys;
#pragma unroll
        for (int n = 0; n < TILE_N / 8; ++n) {
          if (8 * n + lane % 4 * 2 + i % 2 >= end) p[0][n][i] = -cukit::infinity();
        }
      }
    }
    multiply(dp, do_left, at_stage(v_right));
    const auto keys = at_stage(k_again);
#pragma unroll
    for (int step = 0; step < TILE_N / 16; ++step) {
      unsigned ds[4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* s = &p[0][2 * step + n][2 * half];
          const float* g = &dp[0][2 * step + n][2 * half];
          ds[2 * n + half] = cukit::pack<T>(
              exp2f(fmaf(s[0], scale_log2, -row_lse[half])) * (g[0] - row_delta[half]),
              exp2f(fmaf(s[1], scale_log2, -row_lse[half])) * (g[1] - row_delta[half]));
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
          cukit::pack<T>(dq[0][n][2 * half] * scale, dq[0][n][2 * half + 1] * scale);
    }
  __syncwarp();
  const long long row_stride = static_cast<long long>(heads_q) * head_dim;
  T* to = grad_q + (static_cast<long long>(b) * seq_q + first_row) * row_stride + head * head_dim;
  cukit::store_tile<16, HEAD_DIM, cukit::kWarpSize, PADDED>(to, row_stride, shared, warp_row,
                                                            rows_left, head_dim, lane);
}
