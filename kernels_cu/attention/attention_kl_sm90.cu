// Divergence of two models' attention distributions, row by row, on Hopper (wgmma, TMA). The
// equation is in attention_kl_sm80.cu. Neither score matrix is written to global memory.
//
// Papers: Wang et al., MiniLM, arXiv:2002.10957 (the loss); Shah et al., "FlashAttention-3",
//   arXiv:2407.08608 (warp specialisation; products overlap exponentials).
// Mapping: a block iterates over tiles of 64 * CONSUMERS queries of a head (query_work.cuh). A
//   thread of the producer warpgroup issues the TMA loads of both models' queries and, tile by
//   tile, keys (forward_producer_sm90.cuh: the teacher's as Q and K, the student's as second Q and
//   V). Each consumer warpgroup owns 64 queries, keeps two maxima and four sums of each row in
//   registers (kl_rows.cuh) and iterates over tiles of TILE_N keys, last tile first. The teacher's
//   exponentials overlap the student's product and, where the student's lse is not given, the
//   student's exponentials overlap the teacher's next product; the rest overlaps the products of
//   other consumers. A consumer skips tiles that are masked for all of its queries.
// VARLEN: tiles extend into the next sequence, whose keys are masked.
// Shared memory, dynamic: Q_t stages, a tile of 64 queries per consumer | K_t stages | K_s stages |
//   Q_s stages. 2 (HEAD_DIM + VALUE_DIM) (64 CONSUMERS QUERY_STAGES + TILE_N STAGES) bytes, columns
//   in parts of 64. Static: barriers, and the work of each stage of Q.
// Tensor maps: as in flash_attention_sm90.cu, all with boxes [1, rows, 1, 64].
// Macros: DTYPE float16|bfloat16; HEAD_DIM of the teacher, VALUE_DIM of the student, multiples of
//   16 up to 256; CONSUMERS 2|3; TILE_N multiple of 16; STAGES 2..; QUERY_STAGES 1..; THREADS = 128
//   * (CONSUMERS + 1); BLOCKS_PER_SM; DISTILL 1; KNOWN_T, KNOWN_S, PRECISE (kl_rows.cuh); CAUSAL,
//   WINDOW, VARLEN of score_options.cuh.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention_kl.py.
#include "attention/forward_pipelines_sm90.cuh"
#include "attention/forward_producer_sm90.cuh"
#include "attention/forward_work_sm90.cuh"
#include "attention/kl_rows.cuh"
#include "attention/parameters.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/scores/fragment_scores.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace {

namespace consumer {

using Products = float[TILE_N / 2];

// Issues products = Q K^T.
template <typename Queries, typename Keys>
CUKIT_DEVICE void multiply(Products& products, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int step = 0; step < Keys::kSteps; ++step) {
    cukit::wgmma<T, TILE_N>(products, q + Queries::k_step(step), k + Keys::k_step(step), step > 0);
  }
  cukit::wgmma_commit();
}

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const cukit::KlRowArrays& arrays,
                      const Arguments& arguments, const cukit::MappedKlParameters& params) {
  const cukit::ScoreSettings& settings = params.settings;
  const int first_index = Block::consumer_group();
  // The index of this warpgroup among the consumers. VARLEN recomputes it, since no register is
  // left to hold it throughout the loop.
  const auto index = [&] { return VARLEN ? Block::consumer_group() : first_index; };
  const int lane_row = cukit::accumulator_row();
  const int lane_column = cukit::accumulator_column();
  const unsigned long long q_t_first = cukit::uniform_descriptor(QueryTile::k_major(tiles.q));
  const unsigned long long k_t_first = cukit::uniform_descriptor(KeyTile::k_major(tiles.k));
  const unsigned long long q_s_first =
      cukit::uniform_descriptor(SecondQueryTile::k_major(tiles.second_q));
  const unsigned long long k_s_first = cukit::uniform_descriptor(ValueTile::k_major(tiles.v));
  QueryState q_state;
  KeyState t_state, s_state;
  Products t, s;

  cukit::QueryTileScheduler<kTileM, TILE_N> scheduler(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  int part = first_index;  // index of the warpgroup's 64 queries in the tile
  while (next_work(work, pipelines, index(), q_state, scheduler)) {
    const int first_row = work.first_row + part * cukit::kWarpgroupRows;
    const int row = first_row + lane_row;
    const int causal_offset = work.sequence.seq_kv - work.sequence.seq_q;
    const int seq_kv = cukit::warp_uniform(work.sequence.seq_kv);
    const cukit::TileRange visible = cukit::own_keys<TILE_N>(work, first_row, settings);
    // Index of a row in the arrays of row statistics.
    const auto index_of = [&](int lane_row) {
      return cukit::row_statistics(work.b, work.head, params.heads_q, work.sequence, settings) +
             first_row + lane_row;
    };
    cukit::KlRows rows(arrays, index_of(lane_row), work.sequence.seq_q - row,
                       params.teacher_scale_log2, params.scale_log2);
    const int q_stage = q_state.index * CONSUMERS + index();
    const unsigned long long q_t = q_t_first + q_stage * QueryTile::kStage;
    const unsigned long long q_s = q_s_first + q_stage * SecondQueryTile::kStage;

    const auto skip = [&] {
      pipelines.k.skip(t_state);
      pipelines.v.skip(s_state);
    };
    const auto issue_teacher = [&] {
      pipelines.k.wait(t_state);
      cukit::wgmma_fence();
      multiply<QueryTile, KeyTile>(t, q_t, k_t_first + t_state.index * KeyTile::kStage);
    };
    const auto issue_student = [&] {
      pipelines.v.wait(s_state);
      cukit::wgmma_fence();
      multiply<SecondQueryTile, ValueTile>(s, q_s, k_s_first + s_state.index * ValueTile::kStage);
    };
    const auto release_teacher = [&] {
      pipelines.k.release(t_state);
      t_state.advance();
    };
    int tile = visible.end - 1;
    const auto release_student = [&] {
      pipelines.v.release(s_state);
      s_state.advance();
      if (tile == visible.begin) {
        pipelines.q[index()].release(q_state);
        q_state.advance();
      }
    };
    const auto apply_mask = [&](Products& products) {
      if (visible.unmasked(tile)) return;
      cukit::mask_keys(products, {row, tile * TILE_N + lane_column}, causal_offset, seq_kv,
                       settings);
      cukit::make_finite(products);
    };

    for (int masked = work.keys.end; masked > visible.end; --masked) skip();
    if constexpr (KNOWN_S) {
      // Issues both products together: with known lse, the student has no exponentials to overlap.
#pragma unroll 1
      for (; tile >= visible.begin; --tile) {
        issue_teacher();
        issue_student();
        cukit::wgmma_wait<1>(t);
        release_teacher();
        apply_mask(t);
        if constexpr (!PRECISE) rows.add_teacher(t);
        cukit::wgmma_wait<0>(s);
        release_student();
        apply_mask(s);
        if constexpr (PRECISE) {
          rows.add_precise(t, s);
        } else {
          rows.add_cross(t, s);
        }
      }
    } else {
      issue_teacher();
      cukit::wgmma_wait<0>(t);
      release_teacher();
#pragma unroll 1
      for (;;) {
        issue_student();
        apply_mask(t);
        rows.add_teacher(t);
        cukit::wgmma_wait<0>(s);
        release_student();
        apply_mask(s);
        rows.add_cross(t, s);
        if (--tile < visible.begin) break;
        issue_teacher();
        rows.add_student(s);
        cukit::wgmma_wait<0>(t);
        release_teacher();
      }
      rows.add_student(s);
    }
    for (int masked = work.keys.begin; masked < visible.begin; ++masked) skip();
    const int own_row = cukit::accumulator_row(cukit::opaque(threadIdx.x));
    rows.finish(arrays, index_of(own_row), work.sequence.seq_q - first_row - own_row);
    part = part_of_next_tile(part);
  }
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention_kl_sm90(
    const __grid_constant__ cukit::TensorMap q_t,  // [batch, seq_q, heads_q, head_dim]
    const __grid_constant__ cukit::TensorMap k_t,  // [batch, seq_kv, heads_q / teacher_group, head_dim]
    const __grid_constant__ cukit::TensorMap q_s,  // [batch, seq_q, heads_q, value_dim]
    const __grid_constant__ cukit::TensorMap k_s,  // [batch, seq_kv, heads_q / group, value_dim]
    const float* __restrict__ known_t,             // KlRowArrays, all five
    const float* __restrict__ known_s, float* __restrict__ kl, float* __restrict__ lse_t,
    float* __restrict__ lse_s,
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
    int* __restrict__ plan,                 // VARLEN: query_work.cuh
    const __grid_constant__ cukit::MappedKlParameters params) {
  __shared__ Pipelines pipelines;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const Tiles tiles(shared);
  const Arguments arguments{{params.batch, params.heads_q, params.seq_q, params.seq_kv, cu_seqlens_q,
                             cu_seqlens_kv},
                            {plan, plan + 1, plan + 2 + params.batch},
                            {},
                            {},
                            params.group};
  Block::prepare([&] { pipelines.init(); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          const producer::MappedKeyValues keys{&k_t, &k_s, params.teacher_group, params.group};
          producer::run(pipelines, tiles, &q_t, keys, arguments, params.settings, &q_s);
        }
      },
      [&] {
        const cukit::KlRowArrays arrays{known_t, known_s, kl, lse_t, lse_s};
        consumer::run(pipelines, tiles, arrays, arguments, params);
      });
}
