// The consumers of the Hopper backward for heads of more than 128 columns: two warpgroups share 64
// keys.
//
// The values warpgroup (consumer 0) computes P and accumulates dV, the keys warpgroup (consumer 1)
// computes dS and accumulates dK. The rows of P and dS are keys: they leave the tensor cores in the
// layout of a register operand of the products with dO and Q. The keys warpgroup reads P from
// shared memory, which has a stage of P for each stage of Q. Each of its threads reads the elements
// that the same thread of the values warpgroup wrote.
//
// Timeline of query tile i, which is in stage s of the pipelines of Q and dO. s' is the stage of
// tile i - 1; "full" and "empty" are the mbarriers of a stage, P[s] is named barrier kProbabilities
// + s. A stage is empty once both warpgroups have released it.
//
//   STAGES 3: scores first
//   TMA              values warpgroup                        keys warpgroup
//   ---------------  --------------------------------------  --------------------------------------
//   Q[s], lse: full  wait Q[s]                               :
//                    issue S_i = K Q_i^T                     :
//                    wait dO[s']                             :
//                    issue dV += P_i-1^T dO_i-1              :
//   dO[s], delta:    :                                       wait dO[s]
//            full    :                                       issue dP_i = V dO_i^T
//                    :                                       wait Q[s']
//                    :                                       issue dK += dS_i-1^T Q_i-1
//                    S_i complete        | dV runs           dP_i complete           | dK runs
//                    P_i = exp2(S_i-lse) |                   :                       |
//                    store P_i           |                   :                       |
//                    arrive P[s] ----------------------------> sync P[s], load P_i   |
//                    release Q[s]        |                   dS_i = P_i (dP_i-delta) |
//                    :                   |                   release dO[s]           |
//                    dV complete                             dK complete
//                    release dO[s'] -> dO[s'] empty          release Q[s'] -> Q[s'] empty
//                    load P_i (its registers are free)       pack dS_i
//
//   STAGES 2: gradients first
//   TMA              values warpgroup                        keys warpgroup
//   ---------------  --------------------------------------  --------------------------------------
//                    wait dO[s']                             wait Q[s']
//                    issue dV += P_i-1^T dO_i-1              issue dK += dS_i-1^T Q_i-1
//   Q[s], lse: full  wait Q[s], issue S_i                    :
//   dO[s], delta:    :                                       wait dO[s], issue dP_i
//            full    dV complete, release dO[s']             dK complete, release Q[s']
//                    S_i complete                            dP_i complete
//                    P_i, store P_i                          :
//                    arrive P[s] ----------------------------> sync P[s], load P_i
//                    release Q[s]                            dS_i, release dO[s], pack dS_i
//
// With three stages P_i and dS_i overlap the gradient product of the same warpgroup. With two, tile
// i + 1 is loaded into stage s', which the gradient products of tile i - 1 free: they are issued
// first, so that the load starts early, and P_i and dS_i overlap the wgmmas of the other warpgroup.
// P[s] needs no "empty" barrier: the values warpgroup writes stage s again once Q[s] is full again,
// hence after the keys warpgroup released Q[s], which it does after it has read P.
// Before the first tile the values warpgroup waits for K and the keys warpgroup for V; after the
// last one every warp arrives at keys_read, which lets TMA overwrite both.
//
// Registers that are operands of a wgmma are written after the previous wgmma has been awaited:
// otherwise ptxas serialises the wgmmas.
// dQ has its own kernel (flash_attention_backward_query_sm90.cu): adding it to global memory
// here would occupy L2 for longer than all other work.
#pragma once

#include "attention/backward_scores.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

// Stages of P and, with SOFTCAP, of the derivatives of its scores.
constexpr int kScoreTiles = SOFTCAP ? 2 * STAGES : STAGES;
constexpr int kProbabilities = 1;  // first named barrier, one per stage: P is in shared memory
constexpr bool kScoresFirst = STAGES > 2;

static_assert(TILE_N == kWarpgroupRows, "one wgmma of 64 rows");

// The warp's rows of P in a stage, and of the derivatives.
CUKIT_DEVICE ScoreKeys probabilities(const Tiles& tiles, int stage, int warp_row) {
  return ScoreKeys(tiles.scores + stage * ScoreTile::kBytes, warp_row);
}
CUKIT_DEVICE ScoreKeys derivatives(const Tiles& tiles, int stage, int warp_row) {
  return ScoreKeys(tiles.scores + (SOFTCAP ? STAGES + stage : stage) * ScoreTile::kBytes, warp_row);
}

// The values warpgroup. steps > 0.
template <int N>
CUKIT_DEVICE void accumulate_values(float (&dv)[N], Shared& shared, const Tiles& tiles,
                                    const ConsumerWork& work, int steps, float scale_log2,
                                    States& states) {
  const int key = accumulator_row();
  const int warp_row = key / 16 * 16;
  const unsigned long long keys = KeyTile::k_major(tiles.k);
  const unsigned long long queries = QueryTile::k_major(tiles.q);
  const unsigned long long grad_out = GradOutTile::mn_major(tiles.grad_out);
  PipelineState<STAGES>& state = states.queries;
  Position position(work);
  Scores s;
  Packed p;
  Prefetched prefetched;

  const auto tile_at_position = [&] {
    return TileScores(work, position.head, warp_uniform(position.tile), warp_row);
  };
  const auto issue_scores = [&] {
    shared.q.wait(state);
    wgmma_fence();
    multiply_keys<COLUMNS>(s, opaque_descriptor(keys),
                           queries + warp_uniform(state.index) * QueryTile::kStage);
  };
  const auto issue_dv = [&](const PipelineState<STAGES>& of) {
    shared.grad_out.wait(of);
    wgmma_fence();
    multiply_queries(dv, p, grad_out + warp_uniform(of.index) * GradOutTile::kStage);
  };
  // Called once S is complete: computes P, stores it for the keys warpgroup and releases Q.
  const auto publish_probabilities = [&](Packed& packed) {
    const TileScores tile = tile_at_position();
    const ScoreKeys slopes = derivatives(tiles, state.index, warp_row);
    prepare(s, slopes, work, tile, prefetched, key, scale_log2);
    exponentiate(s, packed, shared.lse[state.index] + accumulator_column(), slopes, tile,
                 scale_log2);
    probabilities(tiles, state.index, warp_row).store(packed);
    named_arrive(kProbabilities + state.index, kConsumers * kWarpgroupThreads);
    shared.q.release(state);
  };

  prefetched.load(tile_at_position());
  shared.keys.wait(states.keys);
  issue_scores();
  wgmma_wait<0>(s);
  publish_probabilities(p);
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    const PipelineState<STAGES> now = state;
    state.advance();
    position.advance(work);
    prefetched.load(tile_at_position());
    if constexpr (kScoresFirst) {
      issue_scores();
      issue_dv(now);
      wgmma_wait<1>(s);
      Packed packed;
      publish_probabilities(packed);
      wgmma_wait<0>(dv);
      shared.grad_out.release(now);
      probabilities(tiles, state.index, warp_row).load(p);
    } else {
      issue_dv(now);
      issue_scores();
      wgmma_wait<1>(dv);
      shared.grad_out.release(now);
      wgmma_wait<0>(s);
      publish_probabilities(p);
    }
  }
  issue_dv(state);
  wgmma_wait<0>(dv);
  shared.grad_out.release(state);
  state.advance();
}

// The keys warpgroup. steps > 0.
template <int N>
CUKIT_DEVICE void accumulate_keys(float (&dk)[N], Shared& shared, const Tiles& tiles, int steps,
                                  States& states) {
  const int warp_row = accumulator_row() / 16 * 16;
  const unsigned long long values = ValueTile::k_major(tiles.v);
  const unsigned long long grad_out = GradOutTile::k_major(tiles.grad_out);
  const unsigned long long queries = QueryTile::mn_major(tiles.q);
  PipelineState<STAGES>& state = states.queries;
  Scores dp;
  Packed ds;

  const auto issue_dp = [&] {
    shared.grad_out.wait(state);
    wgmma_fence();
    multiply_keys<VALUE_COLUMNS>(dp, opaque_descriptor(values),
                                 grad_out + warp_uniform(state.index) * GradOutTile::kStage);
  };
  const auto issue_dk = [&](const PipelineState<STAGES>& of) {
    shared.q.wait(of);
    wgmma_fence();
    multiply_queries(dk, ds, queries + warp_uniform(of.index) * QueryTile::kStage);
  };
  // Called once dP is complete: turns it into dS and releases dO.
  const auto receive_probabilities = [&] {
    named_sync(kProbabilities + state.index, kConsumers * kWarpgroupThreads);
    Packed p;
    probabilities(tiles, state.index, warp_row).load(p);
    differentiate(dp, p, shared.delta[state.index] + accumulator_column(),
                  derivatives(tiles, state.index, warp_row));
    __syncwarp();  // all lanes have read delta
    shared.grad_out.release(state);
  };

  shared.values.wait(states.keys);
  issue_dp();
  wgmma_wait<0>(dp);
  receive_probabilities();
  pack_scores(ds, dp);
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    const PipelineState<STAGES> now = state;
    state.advance();
    if constexpr (kScoresFirst) {
      issue_dp();
      issue_dk(now);
      wgmma_wait<1>(dp);
      receive_probabilities();
      wgmma_wait<0>(dk);
      shared.q.release(now);
    } else {
      issue_dk(now);
      issue_dp();
      wgmma_wait<1>(dk);
      shared.q.release(now);
      wgmma_wait<0>(dp);
      receive_probabilities();
    }
    pack_scores(ds, dp);
  }
  issue_dk(state);
  wgmma_wait<0>(dk);
  shared.q.release(state);
  state.advance();
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const ConsumerWork& work,
                             const MakeResults& make_results, float scale_log2,
                             States& states) {
  const int steps = warp_uniform(work.steps);
  const auto release_keys = [&] {
    shared.keys_read.arrive_warp({});
    states.keys.advance();
  };
  const int key = accumulator_row();
  if (Block::consumer_group() == 0) {
    float dv[VALUE_COLUMNS / 2] = {};
    if (steps > 0) {
      accumulate_values(dv, shared, tiles, work, steps, scale_log2, states);
      release_keys();
    }
    const Results results = make_results();
    store<VALUE_PADDED>(results.v, dv, results.keys_left, key, 0);
  } else {
    float dk[COLUMNS / 2] = {};
    if (steps > 0) {
      accumulate_keys(dk, shared, tiles, steps, states);
      release_keys();
    }
    const Results results = make_results();
    store<PADDED>(results.k, dk, results.keys_left, key, 0);
  }
}

}  // namespace cukit::backward
