// Divergence of two models' attention distributions, row by row, without writing either score
// matrix to global memory:
//
//   KL_i = sum_j P_ij (ln P_ij - ln Q_ij)
//   P = softmax(scale_t Q_t K_t^T),  Q = softmax(scale_s Q_s K_s^T)
//
// and, where they are not given, the row-wise log-sum-exps of both. kl_rows.cuh computes the sums;
// both models have the same masks. A query without a visible key has a divergence of 0.
// Papers: Wang et al., MiniLM, arXiv:2002.10957 (the loss); Dao, "FlashAttention-2",
//   arXiv:2307.08691, after Milakov and Gimelshein, arXiv:1805.02867 (the sums).
// Mapping, shared memory: query_key_loop_sm80.cuh, the student's arrays as q and k, the teacher's
//   as grad_out and v. A warp keeps two maxima and four sums of each of its 16 rows in registers
//   (kl_rows.cuh).
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256 and VALUE_DIM, of the teacher; PADDED,
//   VALUE_PADDED; TILE_M = 16 * warps; TILE_N multiple of 16; THREADS; BLOCKS_PER_SM; DISTILL 1;
//   KNOWN_T, KNOWN_S, PRECISE (kl_rows.cuh); CAUSAL, WINDOW, VARLEN of score_options.cuh.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention_kl.py.
#include "attention/kl_rows.cuh"
#include "attention/parameters.cuh"
#include "attention/query_key_loop_sm80.cuh"
#include "common/platform.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention_kl_sm80(
    const T* __restrict__ q_s,  // [batch, seq_q, heads_q, head_dim]
    const T* __restrict__ k_s,  // [batch, seq_kv, heads_q / group, head_dim]
    const T* __restrict__ q_t,  // [batch, seq_q, heads_q, value_dim]
    const T* __restrict__ k_t,  // [batch, seq_kv, heads_q / teacher_group, value_dim]
    const float* __restrict__ known_t,  // KlRowArrays, all five
    const float* __restrict__ known_s, float* __restrict__ kl, float* __restrict__ lse_t,
    float* __restrict__ lse_s,
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
    const __grid_constant__ cukit::QueryGradientParameters params) {
  const cukit::ScoreSettings& settings = params.settings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const cukit::QueryKeyLoop loop(params, cu_seqlens_q, cu_seqlens_kv);
  if (VARLEN && loop.rows_left <= 0) return;
  const cukit::HeadScores options({}, settings, loop.b, loop.head, loop.sequence);
  const cukit::KlRowArrays arrays{known_t, known_s, kl, lse_t, lse_s};
  const int row = loop.lane_row();
  const long long first =
      cukit::row_statistics(loop.b, loop.head, params.heads_q, loop.sequence, settings) + row;
  const int rows_left = loop.sequence.seq_q - row;
  cukit::KlRows rows(arrays, first, rows_left, params.teacher_scale_log2, params.scale_log2);
  const auto add_tile = [&](const cukit::QueryKeyLoop::Tile& tile) {
    cukit::QueryKeyLoop::Scores s, t;
    const auto apply_mask = [&](cukit::QueryKeyLoop::Scores& scores) {
      if (tile.unmasked) return;
      cukit::apply_options(cukit::flat(scores[0]), tile.at, options, 1.0f, settings, false,
                           tile.crosses_last_key);
      cukit::make_finite(cukit::flat(scores[0]));
    };
    tile.multiply_first(s);
    apply_mask(s);
    tile.multiply_second(t);
    apply_mask(t);
    rows.add(cukit::flat(t[0]), cukit::flat(s[0]));
  };
  loop.for_each_tile(shared, q_s, k_s, k_t, q_t, options.causal_offset, add_tile);
  rows.finish(arrays, first, rows_left);
}
