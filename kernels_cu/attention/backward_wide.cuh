// The consumers of the Hopper backward for heads of more than 128 columns: 64 keys together.
//
// The first warpgroup computes P and the second dS, both with keys as rows; they pass them to each other
// through shared memory, in two stages: the first is a tile of queries ahead. Each then computes dK, dV
// and dQ of its share of the columns: 128 for the first, the others for the second. The first takes the
// exponentials of the next tile while the second computes this one's dS; the second has the next dP
// multiplied while it stages dQ, 64 columns at a time for want of registers.
// Accumulators are read in the basic block that issued the younger wgmma, and nothing is in flight where
// the loop turns: otherwise ptxas serialises the wgmmas.
#pragma once

#include "attention/backward_scores.cuh"
#include "attention/backward_share.cuh"
#include "attention/backward_sums.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

using KeyGradient = float[kColumns / 2];

// A warpgroup's first `Columns` of dV += P^T dO or dK += dS^T Q, started.
template <int Columns>
CUKIT_DEVICE void multiply_queries(KeyGradient& sums, unsigned long long scores,
                                   unsigned long long queries) {
  if constexpr (Columns > 0) {
    auto& own = reinterpret_cast<float(&)[Columns / 2]>(sums);
#pragma unroll
    for (int step = 0; step < TILE_M / 16; ++step) {
      wgmma<T, Columns, false, true>(own, scores + ScoreTile::k_step(step),
                                     queries + QueryTile::mn_step(step), true);
    }
  }
  wgmma_commit();
}

// The first `Columns` of a share of dQ = dS K, started; there is no K for the others, which are zero.
template <int Columns, int N>
CUKIT_DEVICE void multiply_scores(float (&dq)[N], unsigned long long ds, unsigned long long keys) {
#pragma unroll
  for (int i = Columns / 2; i < N; ++i) dq[i] = 0.0f;
  if constexpr (Columns > 0) {
    auto& own = reinterpret_cast<float(&)[Columns / 2]>(dq);
#pragma unroll
    for (int step = 0; step < TILE_N / 16; ++step) {
      wgmma<T, Columns, true, true>(own, ds + ScoreTile::mn_step(step),
                                    keys + KeyTile::mn_step(step), step > 0);
    }
  }
  wgmma_commit();
}

// dS = P * (dP - delta), sixteen queries at a time for want of registers: from one tile to the other.
// SOFTCAP: times the score's derivative, which lies where dS is to be.
CUKIT_DEVICE void differentiate(unsigned char* ds_tile, const unsigned char* p_tile, int first_row,
                                const Scores& dp, const float* delta) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned row = first_row + lane % 16;
  const unsigned from = shared_address(p_tile);
  const unsigned to = shared_address(ds_tile);
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    const unsigned chunk = 2 * step + lane / 16;
    unsigned p[4], ds[4];
    ldmatrix_x4(p, ScoreTile::address(from, row, chunk));
    if constexpr (SOFTCAP) ldmatrix_x4(ds, ScoreTile::address(to, row, chunk));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + 16 * step + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* g = &dp[8 * step + 4 * n + 2 * half];
        float pair[2];
        unpack<T>(pair, p[2 * n + half]);
        if constexpr (SOFTCAP) {
          float slope[2];
          unpack<T>(slope, ds[2 * n + half]);
          pair[0] *= slope[0], pair[1] *= slope[1];
        }
        ds[2 * n + half] =
            pack<T>(pair[0] * (g[0] - row_delta.x), pair[1] * (g[1] - row_delta.y));
      }
    }
    stmatrix_x4(ScoreTile::address(to, row, chunk), ds);
  }
}

CUKIT_DEVICE void init_sums(Sums& sums) {
  sums.staged.init(kWarpgroupWarps);
  sums.read.init(1);
  sums.grad_out_read.init(Block::kConsumerWarps);
}

// One warp: adds a warpgroup's share of dQ, tile after tile.
CUKIT_DEVICE void add_up(Shared& shared, const Tiles& tiles, const Work& work,
                         const ScoreSettings& settings, float* grad_q_sum, int* turns, int adder,
                         Progress& progress) {
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  Position position(work);
  SumAccess access;
  // Of the next tile: while TMA reads this one's, unless other blocks wait for it to be added.
  const auto begin = [&] {
    access = SumAccess(turns, position.scratch_row(work), adder);
    access.begin(work, settings, position.tile);
  };
  if (!DETERMINISTIC && work.steps > 0) begin();
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    if constexpr (DETERMINISTIC) begin();
    const PipelineState<STAGES> at = progress.at;
    float* const sum =
        grad_q_sum + query_block<HEAD_DIM>(position.scratch_row(work), adder * kColumns);
    progress.at.advance();
    position.advance(work);
    if constexpr (kOwnStaging) {
      // Parts of a share lie next to each other, here and there.
      const int parts = adder == 0 ? 2 : 1;
      const unsigned char* const staging = tiles.dq + adder * 8 * kPieceBytes;
      shared.sums.staged.wait({adder, static_cast<unsigned>(at.index)});
      __syncwarp();
      if (first_lane) {
        access.enter();
        for (int warp = 0; warp < 4; ++warp) {
          access.add(sum + query_block<HEAD_DIM>(warp * 16, 0),
                     staging + warp * parts * kPieceBytes, parts * kPieceBytes);
        }
        bulk_commit();
      }
    } else {
      const unsigned char* const staging =
          tiles.grad_out + at.index * QueryTile::kBytes + adder * 4 * kPieceBytes;
#pragma unroll
      for (unsigned part = 0; part < 2; ++part) {
        shared.sums.staged.wait({adder, part});
        __syncwarp();
        if (first_lane) {
          if (part == 0) access.enter();
#pragma unroll
          for (int warp = 0; warp < 4; ++warp) {
            access.add(sum + query_block<HEAD_DIM>(warp * 16, part * 64),
                       staging + warp * kPieceBytes, kPieceBytes);
          }
          bulk_commit();
          if (part == 0) {
            bulk_wait_read<0>();
            shared.sums.read.arrive({adder, 0});
          }
        }
      }
    }
    const SumAccess now = access;
    if (!DETERMINISTIC && step + 1 < work.steps) begin();
    if (first_lane) {
      bulk_wait_read<0>();
      if constexpr (kOwnStaging) {
        shared.sums.read.arrive({adder, 0});
      } else {
        shared.grad_out.empty.arrive(at);  // what was staged there has been read
      }
      now.end();
    }
  }
}

// A warp has read a stage of dO.
CUKIT_DEVICE void leave_grad_out(Shared& shared, const PipelineState<STAGES>& at) {
  if constexpr (kOwnStaging) {
    shared.grad_out.release(at);
  } else {
    shared.sums.grad_out_read.arrive_warp(at);
  }
}

// Before dQ is staged: until there is room for it.
CUKIT_DEVICE void wait_for_staging(Shared& shared, const PipelineState<STAGES>& at,
                                   const PipelineState<kAdders>& sum) {
  if constexpr (kOwnStaging) {
    shared.sums.read.wait_previous(sum);
  } else {
    shared.sums.grad_out_read.wait(at);
  }
}

// The first warpgroup.
CUKIT_DEVICE void accumulate_scores(KeyGradient& dk, KeyGradient& dv, Shared& shared,
                                    const Tiles& tiles, const Walk& walk, const Share& share,
                                    int steps, float scale_log2, Progress& progress) {
  const int key = accumulator_row();
  PipelineState<STAGES>& at = progress.at;
  Position position(walk);

  const int warp_row = share.warp * 16;
  const auto tile_at = [&](const Position& place) {
    return TileScores(walk, place.head, warp_uniform(place.tile), warp_row);
  };
  Fetched fetched;

  // The scores of the tile at `position`, and P of them.
  const auto hand_over_next = [&] {
    Scores s;
    fetched.ask(tile_at(position));
    shared.q.wait(at);
    wgmma_fence();
    multiply_keys<COLUMNS>(s, share.k_major(0),
                           share.k_major(kQueriesAt) + at.index * QueryTile::kStage);
    wgmma_wait<0>(s);
    const TileScores tile = tile_at(position);
    // dS of two tiles before is no longer read: the pipeline of Q has come round since.
    const ScoreRows ds_rows(tiles.scores + (2 + at.index) * ScoreTile::kBytes, warp_row);
    Packed p;
    prepare(s, ds_rows, walk, tile, fetched, key, scale_log2);
    exponentiate(s, p, shared.lse[at.index] + share.lane_column, ds_rows, tile, scale_log2);
    ScoreRows(tiles.scores + at.index * ScoreTile::kBytes, warp_row).store(p);
    fence_proxy_async();
    named_sync(kOwn, kWarpgroupThreads);
    named_arrive(kProbabilities + at.index, kConsumers * kWarpgroupThreads);
  };

  shared.keys.wait(progress.keys);
  hand_over_next();

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    float dq[kColumns / 2];
    const PipelineState<STAGES> now = at;
    const PipelineState<kAdders> sum = share.sum(now);
    shared.grad_out.wait(now);
    at.advance();
    position.advance(walk);
    wgmma_fence();
    multiply_queries<share_of(VALUE_COLUMNS, 0)>(dv, share.scores(kProbabilitiesAt, now.index),
                                                 share.columns(kGradOutAt, now.index));
    if (step + 1 < steps) hand_over_next();
    wgmma_wait<0>(dv);
    leave_grad_out(shared, now);
    named_sync(kDerivatives + now.index, kConsumers * kWarpgroupThreads);
    wait_for_staging(shared, now, sum);
    wgmma_fence();
    multiply_scores<share_of(COLUMNS, 0)>(dq, share.queries(now.index), share.keys(0));
    multiply_queries<share_of(COLUMNS, 0)>(dk, share.scores(kDerivativesAt, now.index),
                                           share.columns(kQueriesAt, now.index));
    wgmma_wait<1>(dq);
    stage_piece(share.staging(tiles, now.index, 0), dq, 0);
    if constexpr (kOwnStaging) stage_piece(share.staging(tiles, now.index, 1), dq, kColumns / 4);
    hand_to_adder(shared.sums, sum);
    wgmma_wait<0>(dk);
    shared.q.release(now);
    if constexpr (!kOwnStaging) {
      shared.sums.read.wait(sum);
      stage_piece(share.staging(tiles, now.index, 1), dq, kColumns / 4);
      hand_to_adder(shared.sums, sum);
    }
  }
}

// The second warpgroup.
CUKIT_DEVICE void accumulate_derivatives(KeyGradient& dk, KeyGradient& dv, Shared& shared,
                                         const Tiles& tiles, const Share& all, int steps,
                                         Progress& progress) {
  PipelineState<STAGES>& at = progress.at;
  Scores dp;

  shared.values.wait(progress.keys);
  shared.keys.wait(progress.keys);
  shared.grad_out.wait(at);
  wgmma_fence();
  multiply_keys<VALUE_COLUMNS>(dp, all.k_major(kValuesAt),
                               all.k_major(kGradOutAt) + at.index * QueryTile::kStage);
  wgmma_wait<0>(dp);

#pragma unroll 1
  for (int step = 0;;) {
    QueryGradient dq;
    const Share share = all.rederived();
    const PipelineState<STAGES> now = at;
    const PipelineState<kAdders> sum = share.sum(now);
    named_sync(kProbabilities + now.index, kConsumers * kWarpgroupThreads);
    wgmma_fence();
    multiply_queries<share_of(VALUE_COLUMNS, 1)>(dv, share.scores(kProbabilitiesAt, now.index),
                                                 share.columns(kGradOutAt, now.index));
    differentiate(tiles.scores + (2 + now.index) * ScoreTile::kBytes,
                  tiles.scores + now.index * ScoreTile::kBytes, share.warp * 16, dp,
                  shared.delta[now.index] + share.lane_column);
    fence_proxy_async();
    wgmma_wait<0>(dv);
    leave_grad_out(shared, now);
    named_sync(kOwn + 1, kWarpgroupThreads);
    named_arrive(kDerivatives + now.index, kConsumers * kWarpgroupThreads);

    shared.q.wait(now);
    wait_for_staging(shared, now, sum);
    const bool more = step + 1 < steps;
    at.advance();
    if (more) shared.grad_out.wait(at);
    wgmma_fence();
    multiply_queries<share_of(COLUMNS, 1)>(dk, share.scores(kDerivativesAt, now.index),
                                           share.columns(kQueriesAt, now.index));
    multiply_scores<columns_from(COLUMNS, 128, 64)>(dq, share.queries(now.index), share.keys(0));
    // After the last tile something else, V itself: a path of its own costs registers.
    const unsigned long long values = share.k_major(kValuesAt);
    const unsigned long long next =
        more ? share.k_major(kGradOutAt) + at.index * QueryTile::kStage : values;
    multiply_keys<VALUE_COLUMNS>(dp, values, next);
    wgmma_wait<1>(dq);
    stage_piece(share.staging(tiles, now.index, 0), dq, 0);
    hand_to_adder(shared.sums, sum);
    wgmma_wait<0>(dp);
    if constexpr (!kOwnStaging) {
      wgmma_fence();
      multiply_scores<columns_from(COLUMNS, 192, 64)>(dq, share.queries(now.index), share.keys(1));
      wgmma_wait<0>(dq);
    }
    wgmma_wait<0>(dk);
    shared.q.release(now);
    if constexpr (!kOwnStaging) {
      shared.sums.read.wait(sum);
      stage_piece(share.staging(tiles, now.index, 1), dq, 0);
      hand_to_adder(shared.sums, sum);
    }
    if (!more) break;
    ++step;
  }
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const MakeResults& make_results, float scale_log2,
                             Progress& progress) {
  const int group = Block::consumer_group();
  const int steps = warp_uniform(walk.steps);
  const Share share(tiles, group);
  KeyGradient dk, dv;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0.0f;
  if (steps > 0) {
    if (group == 0) {
      accumulate_scores(dk, dv, shared, tiles, walk, share, steps, scale_log2, progress);
    } else {
      accumulate_derivatives(dk, dv, shared, tiles, share, steps, progress);
    }
    shared.keys_read.arrive_warp({});
    progress.keys.advance();
  }
  const Results results = make_results();
  const int key = accumulator_row();
  constexpr bool kPartial = HEAD_DIM < kConsumers * kColumns;  // the second share
  store<PADDED || kPartial>(results.k, dk, results.keys_left, key, group * kColumns);
  store<VALUE_PADDED || kPartial>(results.v, dv, results.keys_left, key, group * kColumns);
}

}  // namespace cukit::backward
