// The consumers of the Hopper backward for heads of which a warpgroup can sum up dK and dV of 64 keys: up
// to 192 columns of keys and 128 of values. dQ has a kernel of its own.
//
// Nothing holds the warpgroups together but the stages of Q and dO. A warpgroup has dK of the last tile of
// queries and the scores of this one multiplied in one go, then, with P in registers, dP and dV: P and dS,
// keys as rows, leave the tensor cores as what the products with dO and Q take from registers. While it
// computes them, the other's products run: more in flight at once would not fit its registers.
#pragma once

#include "attention/backward_scores.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

constexpr int kScoreTiles = SOFTCAP;  // the derivatives of a tile's scores

static_assert(TILE_N == kConsumers * kWarpgroupRows, "a warpgroup's product has 64 rows");

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const MakeResults& make_results, float scale_log2,
                             Progress& progress) {
  const int first_key = Block::consumer_group() * kWarpgroupRows;
  const int key = first_key + accumulator_row();
  const int warp_key = key / 16 * 16;
  const int steps = warp_uniform(walk.steps);
  const unsigned long long keys = KeyTile::k_major(tiles.k) + KeyTile::rows(1) * first_key;
  const unsigned long long values = ValueTile::k_major(tiles.v) + ValueTile::rows(1) * first_key;
  const unsigned long long q_rows = QueryTile::k_major(tiles.q);
  const unsigned long long q_columns = QueryTile::mn_major(tiles.q);
  const unsigned long long grad_out_rows = GradOutTile::k_major(tiles.grad_out);
  const unsigned long long grad_out_columns = GradOutTile::mn_major(tiles.grad_out);

  float dk[COLUMNS / 2] = {}, dv[VALUE_COLUMNS / 2] = {};
  if (steps > 0) {
    PipelineState<STAGES>& at = progress.at;
    Position position(walk);
    Packed ds;
    Fetched fetched;
    const auto tile_at_position = [&] {
      return TileScores(walk, position.head, warp_uniform(position.tile), warp_key);
    };
    const auto start_scores = [&](Scores& s) {
      shared.q.wait(at);
      wgmma_fence();
      multiply_keys<COLUMNS>(s, opaque_descriptor(keys), q_rows + warp_uniform(at.index) * QueryTile::kStage);
    };
    const auto start_keys = [&] {
      wgmma_fence();
      multiply_queries(dk, ds, q_columns + warp_uniform(at.index) * QueryTile::kStage);
    };
    // The scores have come: P, its product with dO, and dS.
    const auto differentiate_scores = [&](Scores& s) {
      Scores dp;
      Packed p;
      shared.grad_out.wait(at);
      const TileScores tile = tile_at_position();
      const ScoreKeys slopes(tiles.scores, opaque(warp_key));
      prepare(s, slopes, walk, tile, fetched, key, scale_log2);
      exponentiate(s, p, shared.lse[at.index] + accumulator_column(), slopes, tile, scale_log2);
      wgmma_fence();
      multiply_keys<VALUE_COLUMNS>(dp, opaque_descriptor(values), grad_out_rows + warp_uniform(at.index) * GradOutTile::kStage);
      multiply_queries(dv, p, grad_out_columns + warp_uniform(at.index) * GradOutTile::kStage);
      wgmma_wait<1>(dp);
      differentiate(dp, p, shared.delta[at.index] + accumulator_column(), slopes);
      wgmma_wait<0>(dv);
      __syncwarp();  // all lanes have read lse and delta
      shared.grad_out.release(at);
      pack_scores(ds, dp);
    };

    fetched.ask(tile_at_position());
    shared.keys.wait(progress.keys);
    shared.values.wait(progress.keys);
    {
      Scores s;
      start_scores(s);
      wgmma_wait<0>(s);
      differentiate_scores(s);
    }
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      Scores s;
      const PipelineState<STAGES> now = at;
      start_keys();
      at.advance();
      position.advance(walk);
      fetched.ask(tile_at_position());
      start_scores(s);
      wgmma_wait<1>(dk);  // frees the registers of dS
      shared.q.release(now);
      wgmma_wait<0>(s);
      differentiate_scores(s);
    }
    start_keys();
    wgmma_wait<0>(dk);
    shared.q.release(at);
    at.advance();
    shared.keys_read.arrive_warp({});
    progress.keys.advance();
  }
  const Results results = make_results();
  store<PADDED>(results.k, dk, results.keys_left, key, 0);
  store<VALUE_PADDED>(results.v, dv, results.keys_left, key, 0);
}

}  // namespace cukit::backward
