// Gradients of exact attention for Hopper (wgmma, TMA): dK and dV and, for narrow heads (HEAD_DIM
// up to 128), dQ accumulated in float32.
//
//   P = exp(scale * Q K^T - lse)      dV = P^T dO      dP = dO V^T
//   dS = P * (dP - delta)             dK = scale * dS^T Q      dQ = scale * dS K
//
// The score options (score_options.cuh) change P as in the forward; dS is also multiplied by the
//   derivative of a softcap (backward_options.cuh). Tiles of queries that CAUSAL and WINDOW mask
//   for all of a block's keys are not read. VARLEN: blocks find their keys through a plan
//   (backward_work.cuh).
// Papers: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2; Shah et al., "FlashAttention-3",
//   arXiv:2407.08608.
// Mapping: persistent blocks, one per SM. A work item is TILE_N keys of one key head; a block
//   iterates over the queries of `group` query heads that attend to them, in tiles of TILE_M, and
//   then takes the next work item (backward_work.cuh). One warp of the producer warpgroup issues
//   the TMA loads of K, V and, tile by tile, Q and dO (backward_pipelines.cuh); QUERY_GRADIENT: two
//   more issue the TMA reductions of dQ (backward_sums.cuh). The two consumer warpgroups run
//   backward_narrow.cuh for narrow heads and backward_wide.cuh for wide ones, whose dQ
//   flash_attention_backward_query_sm90 computes. SPLIT: if one work item per tile of keys would
//   not fill the GPU, `splits` items share the tile. Each processes part of the query heads and
//   writes its own sums in float32, which flash_attention_backward_sum adds.
// DETERMINISTIC: work items add to a tile of dQ in a fixed order (backward_sums.cuh), and wait only
//   for items that started earlier. Otherwise, without CAUSAL and WINDOW, item n of a head starts
//   at query tile n and wraps around, so that at any time concurrent items add to different rows
//   of dQ.
// ROPE, narrow heads only: q and k are rotated (layers/rope.cu, not interleaved). The inverse
//   rotation of each key's position is applied to dK (flash_attention_backward_finish: to dQ).
// DISTILL, narrow heads only: the gradients of the divergence of two models, as in
//   flash_attention_backward_sm80.cu: V and dO are a teacher's keys and queries, delta is its lse.
// `lse_log2` is +infinity for rows beyond the last query and for queries without a visible key, so
//   that P is 0.
// Shared memory, bytes: 2 (columns of K + columns of V) (TILE_N + STAGES TILE_M) + scores + dQ,
//   dynamic, columns in parts of 64: K | V | Q stages | dO stages | scores | dQ. Scores: 2 TILE_N
//   TILE_M per tile; two tiles (dS) or, for wide heads, STAGES tiles (P), twice that with SOFTCAP.
//   dQ: 4 TILE_M HEAD_DIM, for narrow heads. Static: barriers, work items, stages of lse and delta.
// Tensor maps: Q, dO, K, V as [batch, seq, heads, head_dim] with boxes [1, tile, 1, 64], swizzled
//   by 128 bytes; rows and columns outside the tensor read as zero. VARLEN: maps of sequences
//   (encode_sequence_map), in which rows beyond a sequence also read as zero; seq_q and seq_kv are
//   the longest lengths.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|128|192|256 columns of the tiles of Q and K and of V
//   and dO; PADDED, VALUE_PADDED 0|1 the heads of Q and K, of V and dO are smaller; COLUMNS,
//   VALUE_COLUMNS (backward_pipelines.cuh); TILE_M x TILE_N: 128x128 for HEAD_DIM 64; 64x128 or
//   80x128 for 128, with DISTILL and up to 64 COLUMNS 96x128; 64x64 for 192 and 256; STAGES 2, or
//   3 for HEAD_DIM 192 without SOFTCAP; QUERY_GRADIENT 1 up to HEAD_DIM 128, else 0; THREADS = 384;
//   CAUSAL 0|1; SPLIT 0|1; DETERMINISTIC 0|1; those of score_options.cuh; DISTILL 0|1, default 0,
//   up to HEAD_DIM 128; ROPE 0|1, default 0, for heads of HEAD_DIM columns, without SPLIT, VARLEN
//   and DISTILL.
// Architecture: sm_90 (sm_90a) only. Accumulates in float. dK and dV are deterministic. dQ is
//   deterministic only with DETERMINISTIC: otherwise its additions are unordered.
// Reference: cukit/reference/attention.py.
#include "attention/backward_work.cuh"
#if HEAD_DIM <= 128
#include "attention/backward_narrow.cuh"
#else
#include "attention/backward_wide.cuh"
#endif

namespace {

namespace backward = cukit::backward;
using backward::Block;
using backward::Gradient;

static_assert(THREADS == Block::kThreads, "one producer warpgroup and two consumer warpgroups");
#if ROPE
static_assert(QUERY_GRADIENT && !PADDED && COLUMNS == HEAD_DIM, "a thread holds both columns of each rotated pair");
static_assert(!SPLIT && !VARLEN && !DISTILL, "dK is not a partial sum, and the table row is the key's row");
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_attention_backward_sm90(
    const __grid_constant__ cukit::TensorMap q,         // [batch, seq_q, heads * group, head_dim]
    const __grid_constant__ cukit::TensorMap k,         // [batch, seq_kv, heads / splits, head_dim]
    const __grid_constant__ cukit::TensorMap v,         // as k, with value_dim
    const __grid_constant__ cukit::TensorMap grad_out,  // as q, with value_dim
    const float* __restrict__ lse_log2,  // scratch rows (scratch_rows.cuh)
    const float* __restrict__ delta,     // as lse_log2
    int* __restrict__ counters,          // tickets, then tiles of the scratch; initially zeros
    float* __restrict__ grad_q_sum,      // scratch rows of HEAD_DIM
    Gradient* __restrict__ grad_k,       // [batch, seq_kv, heads, head_dim], rows strided
    Gradient* __restrict__ grad_v,       // as grad_k, with value_dim
    const float* __restrict__ alibi_slopes,     // ScoreArrays
    const cukit::bias_t* __restrict__ bias,     // ScoreArrays
    const unsigned char* __restrict__ mask,     // ScoreArrays
    const int* __restrict__ cu_seqlens_q,       // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,      // [batch + 1]
    const int* __restrict__ plan,           // VARLEN (backward_work.cuh)
#if DISTILL
    const float* __restrict__ upstream,  // scalar or null (1): factor of dK
#endif
#if ROPE
    const float* __restrict__ cos,  // [seq_kv or batch * seq_kv, HEAD_DIM / 2]
    const float* __restrict__ sin,  // as cos
#endif
    const __grid_constant__ cukit::MappedKeyParameters params) {
  __shared__ backward::Shared shared;
  CUKIT_DYNAMIC_SHARED(unsigned char, bytes);
  backward::Tiles tiles;
  tiles.k = bytes;
  tiles.v = tiles.k + backward::KeyTile::kBytes;
  tiles.q = tiles.v + backward::ValueTile::kBytes;
  tiles.grad_out = tiles.q + STAGES * backward::QueryTile::kBytes;
  tiles.scores = tiles.grad_out + STAGES * backward::GradOutTile::kBytes;
  tiles.dq = tiles.scores + backward::kScoreTiles * backward::ScoreTile::kBytes;

  const backward::KeyProblem problem{params, cu_seqlens_q, cu_seqlens_kv, plan};

  Block::prepare([&] {
    for (const cukit::TensorMap* map : {&q, &k, &v, &grad_out}) cukit::prefetch_tensor_map(map);
    shared.work_pipeline.init(Block::kConsumerWarps + backward::kAdders);
    shared.q.init(Block::kConsumerWarps);
    shared.grad_out.init(Block::kConsumerWarps);
#if QUERY_GRADIENT
    backward::init_sums(shared.sums);
#endif
    shared.keys.init(1);
    shared.values.init(1);
    shared.keys_read.init(Block::kConsumerWarps);
  });

  Block::run(
      [&] {
        const int warp = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize);
        backward::States states;
        if (warp == 0) {
          backward::schedule_work(shared, problem, counters, [&](const backward::Work& work) {
            backward::fetch(shared, tiles, &q, &k, &v, &grad_out, lse_log2, delta, work, states);
          });
#if QUERY_GRADIENT
        } else if (warp <= backward::kAdders) {
          backward::for_each_work(shared, [&](const backward::Work& work, const backward::Work&) {
            backward::run_adder(shared, tiles, work, params.settings, grad_q_sum, counters,
                                warp - 1, states);
          });
#endif
        }
      },
      [&] {
        backward::States states;
        backward::for_each_work(shared, [&](const backward::Work& own,
                                            const backward::Work& shared_work) {
          const backward::ConsumerWork work(own, {alibi_slopes, nullptr, bias, mask},
                                            params.settings);
          // Called after the last tile. Reads the work from shared memory again, to save registers.
          const auto results = [&] {
            const long long row = shared_work.key_row;
            const auto target = [&](Gradient* gradient, int row_stride, int columns, float factor) {
              return backward::Target{gradient + row * row_stride + shared_work.head * columns,
                                      row_stride, columns, factor};
            };
#if DISTILL
            const float scale = upstream != nullptr ? params.scale * *upstream : params.scale;
#else
            const float scale = params.scale;
#endif
            backward::Results results{target(grad_k, params.grad_k_row, params.head_dim, scale),
                                      target(grad_v, params.grad_v_row, params.value_dim, 1.0f),
                                      shared_work.keys_left};
#if ROPE
            const long long angle =
                params.table_rows ? row : params.seq_kv - shared_work.keys_left;
            results.cosines = cos + angle * (HEAD_DIM / 2);
            results.sines = sin + angle * (HEAD_DIM / 2);
#endif
            return results;
          };
#if QUERY_GRADIENT
          backward::accumulate(shared, tiles, work, results, params.scale_log2,
                               params.teacher_scale_log2, states);
#else
          backward::accumulate(shared, tiles, work, results, params.scale_log2, states);
#endif
        });
      });
}
