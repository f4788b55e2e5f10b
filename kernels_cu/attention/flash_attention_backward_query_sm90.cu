// Gradient of the queries of exact attention for Hopper (wgmma, TMA), accumulated in a fixed order.
//
//   P = exp(scale * Q K^T - lse)      dS = P * (dO V^T - delta)      dQ = scale * dS K
//
// The score options (score_options.cuh) change P as in the forward; dS is also multiplied by the
// derivative of a softcap.
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with queries in the outer loop and
//   keys in the inner. For heads of more than 128 columns: recomputing P and dS costs two more
//   products than accumulating dQ in flash_attention_backward_sm90, but takes less time than the
//   additions in L2.
// Mapping: a block iterates over tiles of 128 queries of a head (query_work.cuh). A thread of the
//   producer warpgroup schedules them and issues the TMA loads of Q, dO and, tile by tile, K and V.
//   Each of the two consumer warpgroups owns 64 queries, with their dQ in registers, and iterates
//   over tiles of TILE_N keys, last tile first. dS, a register operand of its product, is computed
//   while the wgmmas of the next tile's scores run, and the exponentials of these scores while the
//   wgmmas of dQ run. Only the stages of K and V couple the consumers. A consumer skips tiles that
//   are masked for all of its queries.
// Shared memory, dynamic: Q | dO | K stages | V stages, in parts of 64 columns (shared_tile.cuh).
//   Static: barriers, the current work.
// Tensor maps: Q, dO, K, V as [batch, seq, heads, head_dim] with boxes [1, 64, 1, 64], swizzled by
//   128 bytes; rows and columns outside the tensor read as zero. VARLEN: maps of sequences
//   (encode_sequence_map), in which rows beyond a sequence also read as zero.
// Macros: DTYPE float16|bfloat16; HEAD_DIM, PADDED, VALUE_DIM, VALUE_PADDED as in
//   flash_attention_backward_sm90.cu; COLUMNS of Q and K and VALUE_COLUMNS of V and dO that are
//   multiplied, multiples of 32, default HEAD_DIM; TILE_M 128; TILE_N 64; KEY_STAGES and
//   VALUE_STAGES, at least 1; THREADS = 384; those of score_options.cuh and scratch_rows.cuh.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/parameters.cuh"
#include "attention/query_rows.cuh"
#include "attention/query_work.cuh"
#include "attention/scratch_rows.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"

#ifndef COLUMNS
#define COLUMNS HEAD_DIM
#endif
#ifndef VALUE_COLUMNS
#define VALUE_COLUMNS HEAD_DIM
#endif

namespace {

using T = cukit::element_t;

constexpr int kConsumers = 2;
// With more registers for the producer, the consumers have fewer than 240 each, and ptxas
// serialises their wgmmas.
using Block = cukit::WarpSpecialized<kConsumers, 24>;

using QueryTile = cukit::SharedTile<T, cukit::kWarpgroupRows, COLUMNS>;  // of a warpgroup
using GradOutTile = cukit::SharedTile<T, cukit::kWarpgroupRows, VALUE_COLUMNS>;
using KeyTile = cukit::SharedTile<T, TILE_N, COLUMNS>;
using ValueTile = cukit::SharedTile<T, TILE_N, VALUE_COLUMNS>;

static_assert(THREADS == Block::kThreads, "one producer warpgroup and kConsumers consumer warpgroups");
static_assert(TILE_M == kConsumers * cukit::kWarpgroupRows, "64 queries for each consumer");

using cukit::QueryWork;
using QueryState = cukit::PipelineState<1>;
using KeyState = cukit::PipelineState<KEY_STAGES>;
using ValueState = cukit::PipelineState<VALUE_STAGES>;
using QueryTileScheduler = cukit::QueryTileScheduler<TILE_M, TILE_N>;

struct Shared {
  cukit::Pipeline<1> queries;  // Q, dO and `work`
  cukit::Pipeline<KEY_STAGES> k;
  cukit::Pipeline<VALUE_STAGES> v;
  QueryWork work;  // an empty range of keys: no further work

  // One thread.
  CUKIT_DEVICE void init() {
    queries.init(Block::kConsumerWarps);
    k.init(Block::kConsumerWarps);
    v.init(Block::kConsumerWarps);
  }
};

struct Tiles {
  unsigned char* q;
  unsigned char* grad_out;
  unsigned char* k;
  unsigned char* v;

  CUKIT_DEVICE explicit Tiles(unsigned char* shared)
      : q(shared),
        grad_out(q + kConsumers * QueryTile::kBytes),
        k(grad_out + kConsumers * GradOutTile::kBytes),
        v(k + KEY_STAGES * KeyTile::kBytes) {}
};

struct Maps {
  const cukit::TensorMap *q, *k, *v, *grad_out;
};

// Coordinates of a sequence in the maps: its first rows, and its indices on the outermost axis.
struct MapPlace {
  int first_q, first_kv, outer_q, outer_kv;

  CUKIT_DEVICE MapPlace(const QueryWork& work, int longest_q, int longest_kv)
      : first_q(0), first_kv(0), outer_q(work.b), outer_kv(work.b) {
    if constexpr (VARLEN) {
      const cukit::Sequence& sequence = work.sequence;
      first_q = longest_q - sequence.seq_q;
      first_kv = longest_kv - sequence.seq_kv;
      outer_q = sequence.first_q + sequence.seq_q;
      outer_kv = sequence.first_kv + sequence.seq_kv;
    }
  }
};

// One thread: schedules work and issues the loads of its tiles.
CUKIT_DEVICE void produce(Shared& shared, const Tiles& tiles, const Maps& maps,
                          QueryTileScheduler& scheduler,
                          const cukit::MappedQueryParameters& params) {
  QueryState q_state;
  KeyState k_state;
  ValueState v_state;
  QueryWork work{};
  while (scheduler.next(work)) {
    if (VARLEN && work.sequence.seq_kv == 0) {
      shared.queries.acquire(q_state);
      shared.work = work;
      shared.queries.commit(q_state);
      q_state.advance();
      continue;
    }
    const MapPlace place(work, params.seq_q, params.seq_kv);
    const int key_head = work.head / params.group;
    const int last = work.keys.end - 1;
#pragma unroll 1
    for (int tile = last; tile >= work.keys.begin; --tile) {
      const int key = place.first_kv + tile * TILE_N;
      shared.k.acquire(k_state);
      KeyTile::load(tiles.k + k_state.index * KeyTile::kBytes, maps.k,
                    shared.k.expect(k_state, KeyTile::kBytes), key_head, key, place.outer_kv);
      k_state.advance();
      if (tile == last) {
        shared.queries.acquire(q_state);
        shared.work = work;
        cukit::Mbarrier* const full = shared.queries.expect(
            q_state, kConsumers * (QueryTile::kBytes + GradOutTile::kBytes));
#pragma unroll 1
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
          // A warpgroup beyond the last query loads the tile's first rows again: no box may be
          // entirely outside the tensor (backward_pipelines.cuh).
          const int own_row = work.first_row + consumer * cukit::kWarpgroupRows;
          const int row =
              place.first_q + (own_row < work.sequence.seq_q ? own_row : work.first_row);
          QueryTile::load(tiles.q + consumer * QueryTile::kBytes, maps.q, full, work.head, row,
                          place.outer_q);
          GradOutTile::load(tiles.grad_out + consumer * GradOutTile::kBytes, maps.grad_out, full,
                            work.head, row, place.outer_q);
        }
        q_state.advance();
      }
      shared.v.acquire(v_state);
      ValueTile::load(tiles.v + v_state.index * ValueTile::kBytes, maps.v,
                      shared.v.expect(v_state, ValueTile::kBytes), key_head, key, place.outer_kv);
      v_state.advance();
    }
  }
  shared.queries.acquire(q_state);
  shared.work = QueryWork{};
  shared.queries.commit(q_state);
}

using Scores = float[TILE_N / 2];
using Packed = unsigned[TILE_N / 16][4];
using QueryGradient = float[COLUMNS / 2];

// Issues scores = rows * columns^T. Both operands are K-major.
template <typename Rows, typename Columns>
CUKIT_DEVICE void multiply(Scores& scores, unsigned long long rows, unsigned long long columns) {
#pragma unroll
  for (int step = 0; step < Rows::kSteps; ++step) {
    cukit::wgmma<T, TILE_N>(scores, rows + Rows::k_step(step), columns + Columns::k_step(step),
                            step > 0);
  }
  cukit::wgmma_commit();
}

// Issues dQ += dS K.
CUKIT_DEVICE void multiply_keys(QueryGradient& dq, const Packed& ds, unsigned long long keys) {
#pragma unroll
  for (int step = 0; step < TILE_N / 16; ++step) {
    cukit::wgmma<T, COLUMNS, true>(dq, ds[step], keys + KeyTile::mn_step(step), true);
  }
  cukit::wgmma_commit();
}

struct Arguments {
  const float* lse_log2;
  const float* delta;
  T* grad_q;
  cukit::ScoreArrays arrays;
};

// A consumer's pipeline states.
struct States {
  QueryState queries;
  KeyState k;
  ValueState v;
};

// dQ of a warpgroup's 64 queries, half `part` of the work item's, over the tiles `visible` of keys.
// `row`: the lane's first row.
CUKIT_DEVICE void accumulate(QueryGradient& dq, Shared& shared, const Tiles& tiles,
                             const QueryWork& work, const cukit::TileRange& visible, int part,
                             int row, const cukit::QueryRows& rows, States& states) {
  const unsigned long long q = QueryTile::k_major(tiles.q) + part * QueryTile::kStage;
  const unsigned long long grad_out =
      GradOutTile::k_major(tiles.grad_out) + part * GradOutTile::kStage;
  const unsigned long long k_rows = KeyTile::k_major(tiles.k);
  const unsigned long long k_columns = KeyTile::mn_major(tiles.k);
  const unsigned long long v_rows = ValueTile::k_major(tiles.v);
  KeyState& k_state = states.k;
  ValueState& v_state = states.v;
  int tile = visible.end - 1;
  Packed weights, ds;

  const auto skip = [&](int masked_tiles) {
    for (int i = 0; i < masked_tiles; ++i) {
      shared.k.skip(k_state);
      shared.v.skip(v_state);
    }
  };
  const auto issue_scores = [&](Scores& s) {
    shared.k.wait(k_state);
    cukit::wgmma_fence();
    multiply<QueryTile, KeyTile>(s, cukit::opaque_descriptor(q),
                                 k_rows + cukit::warp_uniform(k_state.index) * KeyTile::kStage);
  };
  const auto issue_derivatives = [&](Scores& dp) {
    shared.v.wait(v_state);
    cukit::wgmma_fence();
    multiply<GradOutTile, ValueTile>(
        dp, cukit::opaque_descriptor(grad_out),
        v_rows + cukit::warp_uniform(v_state.index) * ValueTile::kStage);
  };
  // Called once the scores are complete: computes the weights P of dS.
  const auto exponentiate = [&](Scores& s) {
    const int key = tile * TILE_N;
    rows.exponentiate(s, {row, key + cukit::accumulator_column()}, visible.unmasked(tile),
               key + TILE_N > work.sequence.seq_kv);
#pragma unroll
    for (int i = 0; i < TILE_N / 4; ++i) {
      weights[i / 4][i % 4] = cukit::pack<T>(s[2 * i], s[2 * i + 1]);
    }
  };
  // Called once dP is complete: releases V and computes dS.
  const auto differentiate = [&](const Scores& dp) {
    shared.v.release(v_state);
    v_state.advance();
#pragma unroll
    for (int i = 0; i < TILE_N / 4; ++i) {
      float pair[2];
      cukit::unpack<T>(pair, weights[i / 4][i % 4]);
      ds[i / 4][i % 4] = cukit::pack<T>(rows.gradient(pair[0], dp[2 * i], 2 * i),
                                        rows.gradient(pair[1], dp[2 * i + 1], 2 * i + 1));
    }
  };

  skip(work.keys.end - visible.end);
  {
    Scores s;
    issue_scores(s);
    cukit::wgmma_wait<0>(s);
    exponentiate(s);
  }
#pragma unroll 1
  while (--tile >= visible.begin) {
    Scores s, dp;
    const KeyState now = k_state;
    k_state.advance();
    issue_derivatives(dp);
    issue_scores(s);
    cukit::wgmma_wait<1>(dp);
    differentiate(dp);
    cukit::wgmma_fence();
    multiply_keys(dq, ds, k_columns + now.index * KeyTile::kStage);
    cukit::wgmma_wait<1>(s);
    exponentiate(s);
    cukit::wgmma_wait<0>(dq);
    shared.k.release(now);
  }
  {
    Scores dp;
    issue_derivatives(dp);
    cukit::wgmma_wait<0>(dp);
    differentiate(dp);
  }
  shared.queries.release(states.queries);
  cukit::wgmma_fence();
  multiply_keys(dq, ds, k_columns + k_state.index * KeyTile::kStage);
  cukit::wgmma_wait<0>(dq);
  shared.k.release(k_state);
  k_state.advance();
  skip(visible.begin - work.keys.begin);
}

CUKIT_DEVICE void consume(Shared& shared, const Tiles& tiles, const Arguments& arguments,
                          const cukit::MappedQueryParameters& params) {
  const cukit::ScoreSettings& settings = params.settings;
  States states;
  int part = Block::consumer_group();  // of the tile's queries; alternates, to balance the work

  while (true) {
    shared.queries.wait(states.queries);
    __syncwarp();
    const QueryWork work = cukit::warp_uniform_ints(shared.work);
    __syncwarp();  // all lanes have read the work before one of them releases the stage
    if (work.keys.end == 0) return;
    const cukit::Sequence& sequence = work.sequence;
    const int first_row = work.first_row + part * cukit::kWarpgroupRows;
    QueryGradient dq = {};
    if (!VARLEN || sequence.seq_kv > 0) {
      const cukit::HeadScores head(arguments.arrays, settings, work.b, work.head, sequence);
      const long long first_scratch_row = cukit::scratch_row(
          work.b, work.head, params.heads_q, params.rows_per_head, sequence.first_q);
      const cukit::QueryRows rows(head, settings, params.scale_log2, arguments.lse_log2,
                                  arguments.delta, first_scratch_row,
                                  first_row + cukit::accumulator_row());
      accumulate(dq, shared, tiles, work, cukit::own_keys<TILE_N>(work, first_row, settings), part,
                 first_row + cukit::accumulator_row(), rows, states);
    } else {
      shared.queries.release(states.queries);
    }
    states.queries.advance();

    // Recomputed, to save registers in the loop.
    const int row = first_row + cukit::accumulator_row(cukit::opaque(threadIdx.x));
    const long long row_stride = params.grad_q_row;
    const long long first =
        VARLEN ? sequence.first_q : static_cast<long long>(work.b) * params.seq_q;
    cukit::ResultRows<T> results;
    results.first = arguments.grad_q + (first + row) * row_stride + work.head * params.head_dim;
    results.row_stride = row_stride;
    results.columns = params.head_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      results.factor[half] = params.scale;
      results.exists[half] = row + 8 * half < sequence.seq_q;
    }
    cukit::write_rows<PADDED>(dq, results);
    if (cukit::kUneven) part = cukit::warp_uniform(kConsumers - 1 - part);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_attention_backward_query_sm90(
    const __grid_constant__ cukit::TensorMap q,         // [batch, seq_q, heads_q, head_dim]
    const __grid_constant__ cukit::TensorMap k,  // [batch, seq_kv, heads_q / group, head_dim]
    const __grid_constant__ cukit::TensorMap v,         // as k, with value_dim
    const __grid_constant__ cukit::TensorMap grad_out,  // as q, with value_dim
    const float* __restrict__ lse_log2,  // scratch rows
    const float* __restrict__ delta,     // scratch rows
    T* __restrict__ grad_q,              // [batch, seq_q, heads_q, head_dim], rows strided
    const float* __restrict__ alibi_slopes,  // ScoreArrays
    const cukit::bias_t* __restrict__ bias,  // ScoreArrays
    const unsigned char* __restrict__ mask,  // ScoreArrays
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,   // [batch + 1]
    int* __restrict__ plan,                  // VARLEN: query_work.cuh
    const __grid_constant__ cukit::MappedQueryParameters params) {
  __shared__ Shared shared;
  CUKIT_DYNAMIC_SHARED(unsigned char, bytes);
  const Tiles tiles(bytes);

  Block::prepare([&] {
    for (const cukit::TensorMap* map : {&q, &k, &v, &grad_out}) cukit::prefetch_tensor_map(map);
    shared.init();
  });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          const cukit::WorkProblem problem{params.batch,  params.heads_q, params.seq_q,
                                           params.seq_kv, cu_seqlens_q,   cu_seqlens_kv};
          const cukit::WorkPlan order{plan, plan + 1, plan + 2 + params.batch};
          QueryTileScheduler scheduler(problem, order, params.settings);
          produce(shared, tiles, {&q, &k, &v, &grad_out}, scheduler, params);
        }
      },
      [&] {
        consume(shared, tiles, {lse_log2, delta, grad_q, {alibi_slopes, nullptr, bias, mask}},
                params);
      });
}
