// The consumers of the Hopper backward for heads of up to 128 columns: 64 keys for each warpgroup.
//
// A warpgroup keeps dK and dV of its keys in registers. P and dS, with keys as rows, leave the
// tensor cores in the layout of a register operand of the products with dO and Q. Only dQ needs the
// dS of all keys, which the warpgroups exchange through shared memory (two stages): with 64 columns
// each computes dQ of 64 queries, with 128 the transpose of dQ of 64 columns.
// DISTILL: there is no dV, dP holds a teacher's scores, and P stays unrounded until dS is computed
// from both. If the student has up to 64 columns and the teacher more, each warpgroup computes the
// transpose of dQ of half of the queries.
// dP overlaps the exponentials, dV overlaps dS. Then, with 64 columns, dK overlaps the exchange,
// and the next scores overlap the staging of dQ; with 128, dQ is issued first and is staged while
// dK runs. Accumulators are read in the basic block that issued the later wgmma, and no wgmma is in
// flight at the loop's back edge: otherwise ptxas serialises the wgmmas.
#pragma once

#include "attention/backward_scores.cuh"
#include "attention/backward_sums.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

constexpr int kScoreTiles = 2;  // stages of dS
// Whether a warpgroup computes dQ of half of the queries: half of the columns are padding.
constexpr bool kHalfOfQueries = DISTILL && kTransposed && COLUMNS <= 64;
constexpr int kColumnBytes = TILE_M * 16 * 4;  // sixteen columns of dQ
constexpr int kStagingBytes = (kHalfOfQueries ? 64 : HEAD_DIM) / 16 * kColumnBytes;
// Whether V is a register operand of dP: registers are available, and shared memory bandwidth
// limits the kernel as much as the tensor cores do.
constexpr bool kValuesInRegisters = HEAD_DIM == 64 && !SOFTCAP && !BIAS;
// Whether exponentials come before dP: there are too few registers to overlap the two.
constexpr bool kExponentialsFirst = HEAD_DIM == 64 && SOFTCAP;
constexpr int kExchange = 1;  // named barrier: dS of all keys is in shared memory

static_assert(STAGES == 2 && kAdders == 2 && kScoreTiles == 2, "the pipelines share one state");
static_assert(TILE_N == kConsumers * kWarpgroupRows, "one wgmma of 64 rows per warpgroup");
static_assert(kTransposed || TILE_M == kConsumers * kWarpgroupRows,
              "each warpgroup computes one part of dQ");

constexpr int kQueriesOfDq = kHalfOfQueries ? TILE_M / kConsumers : TILE_M;  // transposed
using QueryGradient = float[kTransposed ? kQueriesOfDq / 2 : KeyTile::kPartColumns / 2];

using KeyGradient = float[COLUMNS / 2];
using ValueGradient = float[VALUE_COLUMNS / 2];

using Rows = unsigned[VALUE_COLUMNS / 16][4];

// This warp's sixteen rows of a tile of values as operand a.
CUKIT_DEVICE void load_rows(Rows& rows, const unsigned char* tile, int first_row) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned from = shared_address(tile);
#pragma unroll
  for (int step = 0; step < VALUE_COLUMNS / 16; ++step) {
    ldmatrix_x4(rows[step], ValueTile::address(from, first_row + lane % 16, 2 * step + lane / 16));
  }
}

// As multiply_keys, with V in registers.
CUKIT_DEVICE void multiply_rows(Scores& scores, const Rows& rows, unsigned long long queries) {
#pragma unroll
  for (int step = 0; step < VALUE_COLUMNS / 16; ++step) {
    wgmma<T, TILE_M>(scores, rows[step], queries + QueryTile::k_step(step), step > 0);
  }
  wgmma_commit();
}

// Issues this warpgroup's part of dQ = dS K, or of its transpose K^T dS^T; zeros where its columns
// are padding.
CUKIT_DEVICE void multiply_scores(QueryGradient& dq, unsigned long long ds, unsigned long long keys,
                                  int group) {
  constexpr int kColumns = 2 * sizeof(QueryGradient) / sizeof(float);
  if (kTransposed && !kHalfOfQueries && COLUMNS <= 64 && group == 1) {
#pragma unroll
    for (float& sum : dq) sum = 0.0f;
  } else {
#pragma unroll
    for (int step = 0; step < TILE_N / 16; ++step) {
      const unsigned long long keys_step = keys + KeyTile::mn_step(step);
      if constexpr (kTransposed) {
        wgmma<T, kColumns, true, false>(dq, keys_step, ds + ScoreTile::k_step(step), step > 0);
      } else {
        wgmma<T, kColumns, true, true>(dq, ds + ScoreTile::mn_step(step), keys_step, step > 0);
      }
    }
  }
  wgmma_commit();
}

CUKIT_DEVICE void init_sums(Sums& sums) {
  sums.staged.init(Block::kConsumerWarps);
  sums.read.init(1);
}

// Stages of dS, and adders, alternate with the stages of Q.
CUKIT_DEVICE PipelineState<kAdders> sum_state(const PipelineState<STAGES>& state) {
  return {state.index, state.phase};
}

// The staging buffer holds one tile of dQ: its phase changes with every tile.
CUKIT_DEVICE PipelineState<kAdders> staging_state(const PipelineState<STAGES>& state) {
  return {0, static_cast<unsigned>(state.index)};
}

// One warp: adds every kAdders-th tile of dQ; while its copy completes, another adder takes the
// next tile.
CUKIT_DEVICE void run_adder(Shared& shared, const Tiles& tiles, const Work& work,
                            const ScoreSettings& settings, float* grad_q_sum, int* counters,
                            int adder, States& states) {
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  Position position(work);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    if (states.queries.index == adder) {
      float* const sum = grad_q_sum + query_block<HEAD_DIM>(position.scratch_row(work), 0);
      SumAccess access(counters, position.scratch_tile(work));
      access.begin(work, settings, position.tile);
      shared.sums.staged.wait(sum_state(states.queries));
      __syncwarp();
      if (first_lane) {
        access.enter();
        access.add(sum, tiles.dq, kStagingBytes);
        bulk_commit();
        bulk_wait_read<0>();
        shared.sums.read.arrive(staging_state(states.queries));
        access.end();
      }
      __syncwarp();
    }
    states.queries.advance();
    position.advance(work);
  }
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const ConsumerWork& work,
                             const MakeResults& make_results, float scale_log2,
                             float teacher_scale_log2, States& states) {
  const int group = Block::consumer_group();
  const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize;
  const int warp_row = group * kWarpgroupRows + warp * 16;
  const int key = group * kWarpgroupRows + accumulator_row();
  const int lane_column = accumulator_column();
  const int steps = warp_uniform(work.steps);

  constexpr int kGroupRows = KeyTile::rows(kWarpgroupRows);
  const unsigned long long k_rows = KeyTile::k_major(tiles.k) + group * kGroupRows;
  const unsigned long long v_rows = ValueTile::k_major(tiles.v) + group * kGroupRows;
  const unsigned long long q_inner = QueryTile::k_major(tiles.q);
  const unsigned long long grad_out_inner = GradOutTile::k_major(tiles.grad_out);
  const unsigned long long q_outer = QueryTile::mn_major(tiles.q);
  [[maybe_unused]] const unsigned long long grad_out_outer =
      GradOutTile::mn_major(tiles.grad_out);
  const unsigned long long ds_part =
      kTransposed ? ScoreTile::k_major(tiles.scores) +
                        (kHalfOfQueries ? group * ScoreTile::rows(kQueriesOfDq) : 0)
                  : ScoreTile::mn_major(tiles.scores) + group * ScoreTile::kPart;
  const unsigned long long k_part =
      KeyTile::mn_major(tiles.k) + (kTransposed && !kHalfOfQueries ? group * KeyTile::kPart : 0);
  // In the layout of the scratch (query_gradient.cuh).
  unsigned char* const staging =
      tiles.dq + (kHalfOfQueries ? warp * kColumnBytes + group * (kColumnBytes / kConsumers)
                                 : (group * kWarpgroupWarps + warp) *
                                       (kStagingBytes / Block::kConsumerWarps));

  KeyGradient dk;
#pragma unroll
  for (float& sum : dk) sum = 0.0f;
#if !DISTILL
  ValueGradient dv;
#pragma unroll
  for (float& sum : dv) sum = 0.0f;
#endif
  if (steps > 0) {
    Scores s;
    PipelineState<STAGES>& state = states.queries;
    Position position(work);
    const auto tile_at = [&](const Position& place) {
      return TileScores(work, place.head, warp_uniform(place.tile), warp_row);
    };
    Prefetched prefetched;
    prefetched.load(tile_at(position));

    shared.keys.wait(states.keys);
    shared.q.wait(state);
    wgmma_fence();
    multiply_keys<COLUMNS>(s, k_rows, q_inner + state.index * QueryTile::kStage);
    shared.values.wait(states.keys);
    Rows v_registers;
    if constexpr (kValuesInRegisters) load_rows(v_registers, tiles.v, warp_row);
    wgmma_wait<0>(s);

#pragma unroll 1
    for (int step = 0;;) {
      Scores dp;
      [[maybe_unused]] Packed packed;
      QueryGradient dq;
      const unsigned long long q_now = q_outer + state.index * QueryTile::kStage;
      const unsigned long long grad_out_stage = state.index * GradOutTile::kStage;
      // opaque: addresses computed before the loop would be spilled.
      const ScoreKeys ds_rows(tiles.scores + state.index * ScoreTile::kBytes, opaque(warp_row));
      const TileScores tile = tile_at(position);
      shared.grad_out.wait(state);
      prepare(s, ds_rows, work, tile, prefetched, key, scale_log2);
      const float* const lse = shared.lse[state.index] + lane_column;
      if constexpr (kExponentialsFirst) exponentiate(s, packed, lse, ds_rows, tile, scale_log2);
      wgmma_fence();
      if constexpr (kValuesInRegisters) {
        multiply_rows(dp, v_registers, grad_out_inner + grad_out_stage);
      } else {
        multiply_keys<VALUE_COLUMNS>(dp, v_rows, grad_out_inner + grad_out_stage);
      }
      Packed ds;
#if DISTILL
      exponentiate_unrounded(s, lse, scale_log2);
      wgmma_wait<0>(dp);
      mask_tile(dp, work, key, tile.first_query);
      subtract(dp, s, shared.delta[state.index] + lane_column, teacher_scale_log2);
#else
      if constexpr (!kExponentialsFirst) exponentiate(s, packed, lse, ds_rows, tile, scale_log2);
      wgmma_fence();
      multiply_queries(dv, packed, grad_out_outer + grad_out_stage);
      wgmma_wait<1>(dp);
      differentiate(dp, packed, shared.delta[state.index] + lane_column, ds_rows);
#endif
      pack_scores(ds, dp);
      ds_rows.store(ds);
      fence_proxy_async();
      const PipelineState<STAGES> now = state;
      const unsigned long long ds_now = ds_part + now.index * ScoreTile::kStage;
      state.advance();
      position.advance(work);
      const auto exchange = [&] { named_sync(kExchange, kConsumers * kWarpgroupThreads); };
      const auto stage_dq = [&] {
        shared.sums.read.wait_previous(staging_state(now));
        stage_blocks(staging, dq);
        signal_adder(shared.sums, sum_state(now));
      };
      const bool last = ++step == steps;
      if constexpr (kTransposed) {
        exchange();
        wgmma_fence();
        multiply_scores(dq, ds_now, k_part, group);
        multiply_queries(dk, ds, q_now);
#if !DISTILL
        wgmma_wait<1>(dv);
#endif
        wgmma_wait<1>(dq);
        shared.grad_out.release(now);
        stage_dq();
        if (last) {
          wgmma_wait<0>(dk);
          shared.q.release(now);
          break;
        }
        prefetched.load(tile_at(position));
        shared.q.wait(state);
        wgmma_fence();
        Scores next;  // a second array: with `s` itself ptxas runs out of registers
        multiply_keys<COLUMNS>(next, k_rows, q_inner + state.index * QueryTile::kStage);
        wgmma_wait<1>(dk);
        shared.q.release(now);
        wgmma_wait<0>(next);
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) s[i] = next[i];
      } else {
        wgmma_fence();
        multiply_queries(dk, ds, q_now);
        exchange();
#if !DISTILL
        wgmma_wait<1>(dv);  // frees the registers of P
#endif
        if (last) {
          multiply_scores(dq, ds_now, k_part, group);
          wgmma_wait<0>(dq);
          shared.q.release(now);
          shared.grad_out.release(now);
          stage_dq();
          break;
        }
        prefetched.load(tile_at(position));
        shared.q.wait(state);
        wgmma_fence();
        multiply_scores(dq, ds_now, k_part, group);
        multiply_keys<COLUMNS>(s, k_rows, q_inner + state.index * QueryTile::kStage);
        wgmma_wait<1>(dq);
        shared.q.release(now);
        shared.grad_out.release(now);
        stage_dq();
        wgmma_wait<0>(s);
      }
    }
    shared.keys_read.arrive_warp({});
    states.keys.advance();
    wgmma_wait<0>(dk);
#if !DISTILL
    wgmma_wait<0>(dv);
#endif
  }
  Results results = make_results();
#if ROPE
  rotate_back(dk, results, key);
#endif
  store<PADDED>(results.k, dk, results.keys_left, key, 0);
#if !DISTILL
  store<VALUE_PADDED>(results.v, dv, results.keys_left, key, 0);
#endif
}

}  // namespace cukit::backward
