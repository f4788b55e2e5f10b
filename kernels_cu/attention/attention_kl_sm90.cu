// Divergence of two models' attention distributions on Hopper's own units (attention_kl_sm80.cu says of
// what), row by row, without either matrix leaving the chip.
//
// Papers: Wang et al., MiniLM, arXiv:2002.10957 (the loss); Shah et al., "FlashAttention-3",
//   arXiv:2407.08608 (warpgroups that copy, products that run beside exponentials).
// Mapping: a block walks over tiles of 64 * CONSUMERS queries of a head (query_work.cuh). A thread of its
//   first warpgroup asks the copy engine for both models' queries and, tile by tile, keys
//   (forward_producer_sm90.cuh: the teacher's as Q and K, the student's as second Q and V); each of the
//   others owns 64 queries, keeps five sums of each row in registers (kl_rows.cuh) and takes the keys in
//   tiles of TILE_N, last tile first. The teacher's exponentials run beside the student's product and,
//   where the student's lse is not known, its exponentials beside the teacher's next product. Other
//   warpgroups multiply while one does neither. Tiles that a mask hides from all 64 queries of a
//   warpgroup are left out.
// VARLEN: tiles reach into the next sequence, whose keys are hidden.
// Shared memory, dynamic: Q_t stages, a tile of 64 queries for every consumer | K_t stages | K_s stages |
//   Q_s stages. 2 (HEAD_DIM + VALUE_DIM) (64 CONSUMERS QUERY_STAGES + TILE_N STAGES) bytes, columns in
//   parts of 64. Static: barriers, and the work of every stage.
// Tensor maps: as of flash_attention_sm90.cu, all of boxes [1, rows, 1, 64].
// Macros: DTYPE float16|bfloat16; HEAD_DIM of the teacher, VALUE_DIM of the student, multiples of 16 up
//   to 256; CONSUMERS 2|3; TILE_N multiple of 16; STAGES 2..; QUERY_STAGES 1..; THREADS = 128 *
//   (CONSUMERS + 1); BLOCKS_PER_SM; DISTILL 1; KNOWN_T, KNOWN_S, PRECISE (kl_rows.cuh); CAUSAL, WINDOW,
//   VARLEN of score_options.cuh.
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

// products = Q K^T, started
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
  const int own_group = Block::consumer_group();
  // Sequences leave no register for it throughout the loop.
  const auto group = [&] { return VARLEN ? Block::consumer_group() : own_group; };
  const int lane_row = cukit::accumulator_row();
  const int lane_column = cukit::accumulator_column();
  const unsigned long long q_t_first = cukit::uniform_descriptor(QueryTile::k_major(tiles.q));
  const unsigned long long k_t_first = cukit::uniform_descriptor(KeyTile::k_major(tiles.k));
  const unsigned long long q_s_first =
      cukit::uniform_descriptor(SecondQueryTile::k_major(tiles.second_q));
  const unsigned long long k_s_first = cukit::uniform_descriptor(ValueTile::k_major(tiles.v));
  QueryState q_at;
  KeyState t_at, s_at;
  Products t, s;

  cukit::QueryTileScheduler<kTileM, TILE_N> queue(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  int part = own_group;  // of a tile's queries
  while (next_work(work, pipelines, group(), q_at, queue)) {
    const int first_row = work.first_row + part * cukit::kWarpgroupRows;
    const int row = first_row + lane_row;
    const int causal_offset = work.sequence.seq_kv - work.sequence.seq_q;
    const int seq_kv = cukit::warp_uniform(work.sequence.seq_kv);
    const cukit::TileRange seen = cukit::own_keys<TILE_N>(work, first_row, settings);
    // Where the lane's first row is read and written.
    const auto index_of = [&](int lane_row) {
      return cukit::row_statistics(work.b, work.head, params.heads_q, work.sequence, settings) +
             first_row + lane_row;
    };
    cukit::KlRows rows(arrays, index_of(lane_row), work.sequence.seq_q - row,
                       params.teacher_scale_log2, params.scale_log2);
    const int q_stage = q_at.index * CONSUMERS + group();
    const unsigned long long q_t = q_t_first + q_stage * QueryTile::kStage;
    const unsigned long long q_s = q_s_first + q_stage * SecondQueryTile::kStage;

    const auto skip = [&] {
      pipelines.k.skip(t_at);
      pipelines.v.skip(s_at);
    };
    const auto start_teacher = [&] {
      pipelines.k.wait(t_at);
      cukit::wgmma_fence();
      multiply<QueryTile, KeyTile>(t, q_t, k_t_first + t_at.index * KeyTile::kStage);
    };
    const auto start_student = [&] {
      pipelines.v.wait(s_at);
      cukit::wgmma_fence();
      multiply<SecondQueryTile, ValueTile>(s, q_s, k_s_first + s_at.index * ValueTile::kStage);
    };
    const auto end_teacher = [&] {
      pipelines.k.release(t_at);
      t_at.advance();
    };
    int tile = seen.end - 1;
    const auto end_student = [&] {
      pipelines.v.release(s_at);
      s_at.advance();
      if (tile == seen.begin) {
        pipelines.q[group()].release(q_at);
        q_at.advance();
      }
    };
    const auto hide = [&](Products& products) {
      if (seen.unmasked(tile)) return;
      cukit::hide_keys(products, {row, tile * TILE_N + lane_column}, causal_offset, seq_kv, settings);
      cukit::make_finite(products);
    };

    for (int unseen = work.keys.end; unseen > seen.end; --unseen) skip();
    if constexpr (KNOWN_S) {
      // Both products together: the student's has no exponentials that another could run beside.
#pragma unroll 1
      for (; tile >= seen.begin; --tile) {
        start_teacher();
        start_student();
        cukit::wgmma_wait<1>(t);
        end_teacher();
        hide(t);
        if constexpr (!PRECISE) rows.teach(t);
        cukit::wgmma_wait<0>(s);
        end_student();
        hide(s);
        if constexpr (PRECISE) {
          rows.compare(t, s);
        } else {
          rows.meet(t, s);
        }
      }
    } else {
      start_teacher();
      cukit::wgmma_wait<0>(t);
      end_teacher();
#pragma unroll 1
      for (;;) {
        start_student();
        hide(t);
        rows.teach(t);
        cukit::wgmma_wait<0>(s);
        end_student();
        hide(s);
        rows.meet(t, s);
        if (--tile < seen.begin) break;
        start_teacher();
        rows.learn(s);
        cukit::wgmma_wait<0>(t);
        end_teacher();
      }
      rows.learn(s);
    }
    for (int unseen = work.keys.begin; unseen < seen.begin; ++unseen) skip();
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
