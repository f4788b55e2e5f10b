// The consumers of the Hopper backward for heads of more than 128 columns: 64 keys together.
//
// The first warpgroup computes P and sums up dV, the second computes dS and sums up dK. Both have keys
// as rows: P and dS leave the tensor cores as what the products with dO and Q take from registers. The
// second reads P from shared memory, a stage for each of Q, each thread what its counterpart has written.
// With three stages either warpgroup starts its next scores before its sum, so that exponentials or dS of
// the next tile run beside the sum's product. With two, the stage that the next scores need is freed by
// the sums of the last tile: a warpgroup starts its sum first, and what it computes runs beside the
// other's products.
// Registers that a product reads are written when the one before has been awaited: otherwise ptxas
// serialises the wgmmas.
// dQ, whose additions would take L2 longer than all its other work, has a kernel of its own
// (flash_attention_backward_query_sm90.cu).
#pragma once

#include "attention/backward_scores.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

// Stages of P; SOFTCAP: and of the derivatives of its scores.
constexpr int kScoreTiles = SOFTCAP ? 2 * STAGES : STAGES;
constexpr int kProbabilities = 1;  // named barriers, one a stage: P is in shared memory
constexpr bool kScoresFirst = STAGES > 2;

static_assert(TILE_N == kWarpgroupRows, "one product of 64 rows");

// The rows of P of a stage that the warp owns, and of the derivatives.
CUKIT_DEVICE ScoreKeys probabilities(const Tiles& tiles, int stage, int warp_row) {
  return ScoreKeys(tiles.scores + stage * ScoreTile::kBytes, warp_row);
}
CUKIT_DEVICE ScoreKeys derivatives(const Tiles& tiles, int stage, int warp_row) {
  return ScoreKeys(tiles.scores + (SOFTCAP ? STAGES + stage : stage) * ScoreTile::kBytes, warp_row);
}

// The first warpgroup. steps > 0.
template <int N>
CUKIT_DEVICE void accumulate_values(float (&dv)[N], Shared& shared, const Tiles& tiles,
                                    const Walk& walk, int steps, float scale_log2,
                                    Progress& progress) {
  const int key = accumulator_row();
  const int warp_row = key / 16 * 16;
  const unsigned long long keys = KeyTile::k_major(tiles.k);
  const unsigned long long queries = QueryTile::k_major(tiles.q);
  const unsigned long long grad_out = GradOutTile::mn_major(tiles.grad_out);
  PipelineState<STAGES>& at = progress.at;
  Position position(walk);
  Scores s;
  Packed p;
  Fetched fetched;

  const auto tile_at_position = [&] {
    return TileScores(walk, position.head, warp_uniform(position.tile), warp_row);
  };
  const auto start_scores = [&] {
    shared.q.wait(at);
    wgmma_fence();
    multiply_keys<COLUMNS>(s, opaque_descriptor(keys),
                           queries + warp_uniform(at.index) * QueryTile::kStage);
  };
  const auto start_values = [&](const PipelineState<STAGES>& of) {
    shared.grad_out.wait(of);
    wgmma_fence();
    multiply_queries(dv, p, grad_out + warp_uniform(of.index) * GradOutTile::kStage);
  };
  // The scores have come: P of them, for both warpgroups. What the stage held is no longer read: the
  // pipeline of Q has come round since.
  const auto hand_over = [&](Packed& packed) {
    const TileScores tile = tile_at_position();
    const ScoreKeys slopes = derivatives(tiles, at.index, warp_row);
    prepare(s, slopes, walk, tile, fetched, key, scale_log2);
    exponentiate(s, packed, shared.lse[at.index] + accumulator_column(), slopes, tile, scale_log2);
    probabilities(tiles, at.index, warp_row).store(packed);
    named_arrive(kProbabilities + at.index, kConsumers * kWarpgroupThreads);
    shared.q.release(at);
  };

  fetched.ask(tile_at_position());
  shared.keys.wait(progress.keys);
  start_scores();
  wgmma_wait<0>(s);
  hand_over(p);
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    const PipelineState<STAGES> now = at;
    at.advance();
    position.advance(walk);
    fetched.ask(tile_at_position());
    if constexpr (kScoresFirst) {
      start_scores();
      start_values(now);
      wgmma_wait<1>(s);
      Packed packed;
      hand_over(packed);
      wgmma_wait<0>(dv);
      shared.grad_out.release(now);
      probabilities(tiles, at.index, warp_row).load(p);
    } else {
      start_values(now);
      start_scores();
      wgmma_wait<1>(dv);
      shared.grad_out.release(now);
      wgmma_wait<0>(s);
      hand_over(p);
    }
  }
  start_values(at);
  wgmma_wait<0>(dv);
  shared.grad_out.release(at);
  at.advance();
}

// The second warpgroup. steps > 0.
template <int N>
CUKIT_DEVICE void accumulate_keys(float (&dk)[N], Shared& shared, const Tiles& tiles, int steps,
                                  Progress& progress) {
  const int warp_row = accumulator_row() / 16 * 16;
  const unsigned long long values = ValueTile::k_major(tiles.v);
  const unsigned long long grad_out = GradOutTile::k_major(tiles.grad_out);
  const unsigned long long queries = QueryTile::mn_major(tiles.q);
  PipelineState<STAGES>& at = progress.at;
  Scores dp;
  Packed ds;

  const auto start_derivatives = [&] {
    shared.grad_out.wait(at);
    wgmma_fence();
    multiply_keys<VALUE_COLUMNS>(dp, opaque_descriptor(values),
                                 grad_out + warp_uniform(at.index) * GradOutTile::kStage);
  };
  const auto start_keys = [&](const PipelineState<STAGES>& of) {
    shared.q.wait(of);
    wgmma_fence();
    multiply_queries(dk, ds, queries + warp_uniform(of.index) * QueryTile::kStage);
  };
  // dP has come: dS of it.
  const auto receive = [&] {
    named_sync(kProbabilities + at.index, kConsumers * kWarpgroupThreads);
    Packed p;
    probabilities(tiles, at.index, warp_row).load(p);
    differentiate(dp, p, shared.delta[at.index] + accumulator_column(),
                  derivatives(tiles, at.index, warp_row));
    __syncwarp();  // all lanes have read delta
    shared.grad_out.release(at);
  };

  shared.values.wait(progress.keys);
  start_derivatives();
  wgmma_wait<0>(dp);
  receive();
  pack_scores(ds, dp);
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    const PipelineState<STAGES> now = at;
    at.advance();
    if constexpr (kScoresFirst) {
      start_derivatives();
      start_keys(now);
      wgmma_wait<1>(dp);
      receive();
      wgmma_wait<0>(dk);
      shared.q.release(now);
    } else {
      start_keys(now);
      start_derivatives();
      wgmma_wait<1>(dk);
      shared.q.release(now);
      wgmma_wait<0>(dp);
      receive();
    }
    pack_scores(ds, dp);
  }
  start_keys(at);
  wgmma_wait<0>(dk);
  shared.q.release(at);
  at.advance();
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const MakeResults& make_results, float scale_log2,
                             Progress& progress) {
  const int steps = warp_uniform(walk.steps);
  const auto leave_keys = [&] {
    shared.keys_read.arrive_warp({});
    progress.keys.advance();
  };
  const int key = accumulator_row();
  if (Block::consumer_group() == 0) {
    float dv[VALUE_COLUMNS / 2] = {};
    if (steps > 0) {
      accumulate_values(dv, shared, tiles, walk, steps, scale_log2, progress);
      leave_keys();
    }
    const Results results = make_results();
    store<VALUE_PADDED>(results.v, dv, results.keys_left, key, 0);
  } else {
    float dk[COLUMNS / 2] = {};
    if (steps > 0) {
      accumulate_keys(dk, shared, tiles, steps, progress);
      leave_keys();
    }
    const Results results = make_results();
    store<PADDED>(results.k, dk, results.keys_left, key, 0);
  }
}

}  // namespace cukit::backward
