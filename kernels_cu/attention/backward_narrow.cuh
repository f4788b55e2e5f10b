// The two warpgroups of the Hopper backward for heads up to 128 wide: 64 keys each.
//
// dK and dV of its keys stay in a warpgroup's registers; P and dS, keys as rows, are already what the
// products with dO and Q take from registers. Only dQ needs the dS of all keys, which change hands
// through shared memory (two stages); each warpgroup computes half of its rows (TILE_M 128) or columns
// (TILE_M 64).
// The scores of the next tile are started before dQ of this one is awaited, so that the tensor cores
// have work while dQ is added. dP runs beside the exponentials, dV beside dS, dK beside the exchange.
// What is read while a younger product runs is read in the straight line that started it, and nothing
// runs where the loop turns: else the compiler has products run one by one.
#pragma once

#include "attention/backward_scores.cuh"
#include "attention/backward_sums.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

constexpr int kScoreParts = TILE_M / 64;
constexpr int kScoreBytes = kScoreParts * kKeyPart;
constexpr int kScoreTiles = 2;  // stages of dS
constexpr int kGradOutReaders = kConsumers * 4;
// Operand a of dP: with registers to spare, and shared memory as busy as the tensor cores.
constexpr bool kValuesInRegisters = HEAD_DIM == 64 && !SOFTCAP && !BIAS;
// dP beside the exponentials: unless there are no registers for both.
constexpr bool kExponentialsFirst = HEAD_DIM == 64 && SOFTCAP;
constexpr int kExchange = 1;  // named barrier: dS of all keys is in shared memory

static_assert(TILE_N == kConsumers * 64, "a warpgroup's product has 64 rows");
static_assert(kParts * kScoreParts == kConsumers, "dQ is cut into a part for each warpgroup");

using KeyGradient = float[COLUMNS / 2];
using ValueGradient = float[VALUE_COLUMNS / 2];

using Rows = unsigned[VALUE_COLUMNS / 16][4];

// This warp's sixteen rows of a tile of values as operand a.
CUKIT_DEVICE void load_rows(Rows& rows, const unsigned char* tile, int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + lane % 16;
  const unsigned from = shared_address(tile) + row * kRowBytes;
#pragma unroll
  for (int step = 0; step < VALUE_COLUMNS / 16; ++step) {
    const int within = (step % 4 * 2 + lane / 16) ^ (row % 8);
    ldmatrix_x4(rows[step], from + step / 4 * kKeyPart + within * 16);
  }
}

// As multiply_keys, with the values in registers.
CUKIT_DEVICE void multiply_rows(Scores& scores, const Rows& rows, unsigned long long queries) {
#pragma unroll
  for (int step = 0; step < VALUE_COLUMNS / 16; ++step) {
    const int within = step % 4 * 32;
    wgmma<T, TILE_M>(scores, rows[step], queries + (step / 4 * kQueryPart + within) / 16, step > 0);
  }
  wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q, started.
template <int N>
CUKIT_DEVICE void multiply_queries(float (&sums)[N], const Packed& scores,
                                   unsigned long long queries) {
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    wgmma<T, 2 * N, true>(sums, scores[step], queries + step * 16 * kRowBytes / 16, true);
  }
  wgmma_commit();
}

// This warpgroup's part of dQ = dS K, started; zero where its columns have no K.
CUKIT_DEVICE void multiply_scores(QueryGradient& dq, unsigned long long ds, unsigned long long keys,
                                  int group) {
  if (kParts == 2 && parts_of(COLUMNS) == 1 && group == 1) {
#pragma unroll
    for (float& sum : dq) sum = 0.0f;
  } else {
#pragma unroll
    for (int step = 0; step < TILE_N / 16; ++step) {
      wgmma<T, 64, true, true>(dq, ds + step * 16 * kRowBytes / 16,
                               keys + step * 16 * kRowBytes / 16, step > 0);
    }
  }
  wgmma_commit();
}

CUKIT_DEVICE void init_sums(Sums& sums) {
  for (Mbarrier& staged : sums.staged) mbarrier_init(&staged, kConsumers * 4);
  mbarrier_init(&sums.read[0], 1);
}

// One thread's work: adds every kAdders-th tile of dQ. While its copy ends, another takes the next tile.
CUKIT_DEVICE void add_up(Shared& shared, const Tiles& tiles, const Walk& walk, float* grad_q_sum,
                         int* turns, int adder) {
  Position position(walk);
  for (int step = 0; step < walk.steps; ++step) {
    if (step % kAdders == adder) {
      const long long row = position.scratch_row(walk);
      int* const counter = turn_counter(turns, row, 0);
      begin_turn(counter, turn_of(walk, position.tile));
      mbarrier_wait(&shared.sums.staged[adder], step / kAdders % 2);
      bulk_add(grad_q_sum + query_block<HEAD_DIM>(row, 0), tiles.dq, TILE_M * HEAD_DIM * 4);
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(&shared.sums.read[0]);
      end_turn(counter);
    }
    position.advance(walk);
  }
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const MakeResults& make_results, float scale_log2) {
  const int group = warp_uniform(threadIdx.x / kGroupThreads) - 1;
  const int warp = threadIdx.x % kGroupThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = group * 64 + warp * 16;
  const int key = warp_row + lane / 4;
  const int lane_column = threadIdx.x % 4 * 2;
  const int steps = warp_uniform(walk.steps);

  const unsigned long long k_rows = inner_descriptor(tiles.k + group * 64 * kRowBytes);
  const unsigned long long v_rows = inner_descriptor(tiles.v + group * 64 * kRowBytes);
  const unsigned long long q_inner = inner_descriptor(tiles.q);
  const unsigned long long grad_out_inner = inner_descriptor(tiles.grad_out);
  const unsigned long long q_outer = outer_descriptor(tiles.q, kQueryPart);
  const unsigned long long grad_out_outer = outer_descriptor(tiles.grad_out, kQueryPart);
  // dQ: with two parts of queries each warpgroup takes one of them, else one of the columns.
  const int part = group * kKeyPart;
  const unsigned long long ds_part =
      outer_descriptor(tiles.scores + (kScoreParts == 2 ? part : 0), kKeyPart);
  const unsigned long long k_part = outer_descriptor(tiles.k + (kParts == 2 ? part : 0), kKeyPart);
  // As the tile lies in the scratch.
  const int piece = kScoreParts == 2 ? group * 4 + warp : warp * kParts + group;
  unsigned char* const staging = tiles.dq + piece * kPieceBytes;

  KeyGradient dk;
  ValueGradient dv;
#pragma unroll
  for (float& sum : dk) sum = 0.0f;
#pragma unroll
  for (float& sum : dv) sum = 0.0f;
  if (steps > 0) {
    Scores s;
    Cursor<STAGES> at;
    Position position(walk);
    int ds_stage = 0;
    const auto tile_at = [&](const Position& place) {
      return TileScores(walk, place.head, warp_uniform(place.tile), warp_row);
    };
    Fetched fetched;
    fetched.ask(tile_at(position));

    mbarrier_wait(&shared.keys, 0);
    mbarrier_wait(&shared.q.full[0], 0);
    wgmma_fence();
    multiply_keys<COLUMNS>(s, k_rows, q_inner);
    mbarrier_wait(&shared.values, 0);
    Rows v_registers;
    if constexpr (kValuesInRegisters) load_rows(v_registers, tiles.v, warp_row);
    wgmma_wait<0>(s);

#pragma unroll 1
    for (int step = 0;;) {
      Scores dp;
      Packed packed;
      QueryGradient dq;
      const unsigned long long stage = at.stage * (kQueryBytes / 16);
      const ScoreRows ds_rows(tiles.scores + ds_stage * kScoreBytes, warp_row);
      const TileScores tile = tile_at(position);
      mbarrier_wait(&shared.grad_out.full[at.stage], at.parity);
      prepare(s, ds_rows, walk, tile, fetched, key, scale_log2);
      const float* const lse = shared.lse[at.stage] + lane_column;
      if constexpr (kExponentialsFirst) exponentiate(s, packed, lse, ds_rows, tile, scale_log2);
      wgmma_fence();
      if constexpr (kValuesInRegisters) {
        multiply_rows(dp, v_registers, grad_out_inner + stage);
      } else {
        multiply_keys<VALUE_COLUMNS>(dp, v_rows, grad_out_inner + stage);
      }
      if constexpr (!kExponentialsFirst) exponentiate(s, packed, lse, ds_rows, tile, scale_log2);
      wgmma_fence();
      multiply_queries(dv, packed, grad_out_outer + stage);
      wgmma_wait<1>(dp);
      Packed ds;
      differentiate(ds, packed, dp, shared.delta[at.stage] + lane_column, ds_rows);
      ds_rows.store(ds);
      fence_proxy_async();
      wgmma_fence();
      multiply_queries(dk, ds, q_outer + stage);
      named_sync(kExchange, kConsumers * kGroupThreads);
      wgmma_wait<1>(dv);  // frees the registers of P

      const unsigned long long ds_now = ds_part + ds_stage * (kScoreBytes / 16);
      const Cursor<STAGES> done = at;
      const int index = step;
      const auto hand_over = [&] {
        mbarrier_wait(&shared.sums.read[0], (index + 1) % 2);
        stage_piece(staging, dq, 0, &shared.sums.staged[index % kAdders]);
      };
      ds_stage ^= 1;
      at.advance();
      position.advance(walk);
      if (++step == steps) {
        multiply_scores(dq, ds_now, k_part, group);
        wgmma_wait<0>(dq);
        hand_over();
        break;
      }
      fetched.ask(tile_at(position));
      mbarrier_wait(&shared.q.full[at.stage], at.parity);
      wgmma_fence();
      multiply_scores(dq, ds_now, k_part, group);
      multiply_keys<COLUMNS>(s, k_rows, q_inner + at.stage * (kQueryBytes / 16));
      wgmma_wait<1>(dq);
      release(shared.q, done);
      release(shared.grad_out, done);
      hand_over();
      wgmma_wait<0>(s);
    }
    wgmma_wait<0>(dk);
    wgmma_wait<0>(dv);
  }
  const Results results = make_results();
  store<PADDED>(results.k, dk, results.keys_left, key, 0);
  store<VALUE_PADDED>(results.v, dv, results.keys_left, key, 0);
}

}  // namespace cukit::backward
