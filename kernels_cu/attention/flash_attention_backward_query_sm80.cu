// Gradient of the queries of exact attention, accumulated in a fixed order.
//
//   P = exp(scale * Q K^T - lse)      dS = P * (dO V^T - delta)      dQ = scale * dS K
//
// The score options (score_options.cuh) change P as in the forward; dS is also multiplied by the
// derivative of a softcap.
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with queries in the outer loop and
//   keys in the inner: recomputing P and dS costs two more products than accumulating dQ in
//   flash_attention_backward_sm80.cu, but needs no atomics.
// Mapping: a block owns TILE_M queries of one head, a warp 16 of them. It iterates over the keys
//   and values in tiles of TILE_N; the next tile is copied while this one is multiplied. dS is a
//   register operand of its product.
// Shared memory, bytes: 2 (HEAD_DIM + VALUE_DIM) (TILE_M + 2 TILE_N), dynamic:
//   Q | dO | K, two stages | V, two.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than
//   HEAD_DIM; TILE_M = 16 * warps; TILE_N multiple of 16; THREADS; BLOCKS_PER_SM; DISTILL
//   (query_rows.cuh), default 0; those of score_options.cuh and scratch_rows.cuh.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/parameters.cuh"
#include "attention/query_key_loop_sm80.cuh"
#include "attention/query_rows.cuh"
#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_attention_backward_query_sm80(
        const T* __restrict__ q,         // [batch, seq_q, heads_q, head_dim]
        const T* __restrict__ k,         // [batch, seq_kv, heads_q / group, head_dim]
        const T* __restrict__ v,         // [batch, seq_kv, heads_q / group, value_dim]
        const T* __restrict__ grad_out,  // [batch, seq_q, heads_q, value_dim]
        const float* __restrict__ lse_log2,  // scratch rows
        const float* __restrict__ delta,     // scratch rows
        T* __restrict__ grad_q,          // [batch, seq_q, heads_q, head_dim], rows strided
        const float* __restrict__ alibi_slopes, const float* __restrict__ sinks,  // ScoreArrays
        const cukit::bias_t* __restrict__ bias, const unsigned char* __restrict__ mask,
        const int* __restrict__ cu_seqlens_q,   // [batch + 1]
        const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
#if DISTILL
        const float* __restrict__ upstream,  // scalar or null (1): factor of dQ
#endif
        const __grid_constant__ cukit::QueryGradientParameters params) {
  const cukit::ScoreSettings& settings = params.settings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const cukit::QueryKeyLoop loop(params, cu_seqlens_q, cu_seqlens_kv);
  if (VARLEN && loop.rows_left <= 0) return;
  const cukit::HeadScores options({alibi_slopes, sinks, bias, mask}, settings, loop.b, loop.head,
                                  loop.sequence);
  const cukit::QueryRows rows(
      options, settings, params.scale_log2, lse_log2, delta,
      cukit::scratch_row(loop.b, loop.head, params.heads_q, params.rows_per_head,
                         loop.sequence.first_q),
      loop.lane_row());

  float dq[1][HEAD_DIM / 8][4];
  cukit::clear(dq);
  const auto add_tile = [&](const cukit::QueryKeyLoop::Tile& tile) {
    cukit::QueryKeyLoop::Scores p, dp;
    tile.multiply_first(p);
    rows.exponentiate(cukit::flat(p[0]), tile.at, tile.unmasked, tile.crosses_last_key);
    tile.multiply_second(dp);
#if DISTILL
    rows.exponentiate_teacher(cukit::flat(dp[0]), tile.at, tile.unmasked, tile.crosses_last_key,
                              params.teacher_scale_log2);
#endif
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
          [&](unsigned(&r)[4], int n, int) { tile.keys(r, 16 * step, 8 * n); });
    }
  };
  loop.for_each_tile(shared, q, k, v, grad_out, options.causal_offset, add_tile);

  // Each warp stages its own rows in the memory of the query tile, so that no block-wide barrier is
  // needed.
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp_row = cukit::QueryKeyLoop::warp_row();
#if DISTILL
  const float scale = upstream != nullptr ? params.scale * *upstream : params.scale;
#else
  const float scale = params.scale;
#endif
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
  const long long row_stride = params.grad_q_row;
  const long long first = VARLEN ? 0 : static_cast<long long>(loop.b) * params.seq_q;
  T* to = grad_q + (first + loop.row_of_q()) * row_stride + loop.head * params.head_dim;
  cukit::store_tile<16, HEAD_DIM, cukit::kWarpSize, PADDED>(
      to, row_stride, shared, warp_row, loop.rows_left, params.head_dim, lane);
}
