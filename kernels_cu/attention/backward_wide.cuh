// The two warpgroups of the Hopper backward for heads of 256 columns: 64 keys together.
//
// The first warpgroup computes P and the second dS, both with keys as rows; they hand them over through
// shared memory, in two stages: the first is a tile of queries ahead. Each then computes dK, dV and dQ
// of its half of the columns. The first takes the exponentials of the next tile while the second
// computes this one's dS; the second has the next dP multiplied while it adds dQ, in two parts of 64
// columns, for want of registers.
// What is read while a younger product runs is read in the straight line that started it, and nothing
// runs where the loop turns: else the compiler has products run one by one.
#pragma once

#include "attention/backward_scores.cuh"
#include "attention/backward_sums.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

constexpr int kScoreBytes = kKeyPart;
constexpr int kScoreTiles = 4;  // two stages of P, two of dS
constexpr int kGradOutReaders = kAdders;
constexpr int kColumns = HEAD_DIM / kConsumers;
// Named barriers, two each, as the first warpgroup is ahead by one: P is in shared memory; dS is, and
// P is no longer read; and one for each warpgroup's own threads.
constexpr int kProbabilities = 1;
constexpr int kDerivatives = 3;
constexpr int kOwn = 5;

static_assert(TILE_N == 64 && TILE_M == 64, "one product of 64 rows each way");
static_assert(kColumns == 128, "two parts of 64 columns for each warpgroup");
static_assert(STAGES == 2, "derivatives of a softcap wait where dS is to be");

using KeyGradient = float[kColumns / 2];

// Of `columns`, those from `first` on, `most` at most.
constexpr int columns_from(int columns, int first, int most) {
  const int left = columns - first;
  return left < 0 ? 0 : left < most ? left : most;
}

// Of `columns`, those that are the warpgroup's.
constexpr int share_of(int columns, int group) {
  return columns_from(columns, group * kColumns, kColumns);
}

// A warpgroup's first `Columns` of dV += P^T dO or dK += dS^T Q, started.
template <int Columns>
CUKIT_DEVICE void multiply_queries(KeyGradient& sums, unsigned long long scores,
                                   unsigned long long queries) {
  if constexpr (Columns > 0) {
    auto& own = reinterpret_cast<float(&)[Columns / 2]>(sums);
#pragma unroll
    for (int step = 0; step < TILE_M / 16; ++step) {
      wgmma<T, Columns, false, true>(own, scores + step * 32 / 16,
                                     queries + step * 16 * kRowBytes / 16, true);
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
      wgmma<T, Columns, true, true>(own, ds + step * 16 * kRowBytes / 16,
                                    keys + step * 16 * kRowBytes / 16, step > 0);
    }
  }
  wgmma_commit();
}

// dS = P * (dP - delta), sixteen queries at a time for want of registers: from one tile to the other.
// SOFTCAP: times the score's derivative, which lies where dS is to be.
CUKIT_DEVICE void differentiate(unsigned char* ds_tile, const unsigned char* p_tile, int first_row,
                                const Scores& dp, const float* delta) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + lane % 16;
  const unsigned from = shared_address(p_tile) + row * kRowBytes;
  const unsigned to = shared_address(ds_tile) + row * kRowBytes;
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    const int within = ((step * 2 + lane / 16) ^ (row % 8)) * 16;
    unsigned p[4], ds[4];
    ldmatrix_x4(p, from + within);
    if constexpr (SOFTCAP) ldmatrix_x4(ds, to + within);
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
    stmatrix_x4(to + within, ds);
  }
}

constexpr int kScoreStage = kScoreBytes / 16;  // in descriptors
constexpr int kQueryStage = kQueryBytes / 16;

// Where tiles lie from the first of K on, in bytes.
constexpr int kValuesAt = kKeyBytes;
constexpr int kQueriesAt = kValuesAt + kKeyBytes;
constexpr int kGradOutAt = kQueriesAt + STAGES * kQueryBytes;
constexpr int kProbabilitiesAt = kGradOutAt + STAGES * kQueryBytes;
constexpr int kDerivativesAt = kProbabilitiesAt + 2 * kScoreBytes;

CUKIT_DEVICE void init_sums(Sums& sums) {
  for (Mbarrier& staged : sums.staged) mbarrier_init(&staged, 4);
  for (Mbarrier& read : sums.read) mbarrier_init(&read, 1);
  for (Mbarrier& read : sums.grad_out_read) mbarrier_init(&read, kConsumers * 4);
}

// One thread's work: adds a warpgroup's share of dQ, tile after tile, and passes the stage of dO in which
// it was staged on to the thread that fetches.
CUKIT_DEVICE void add_up(Shared& shared, const Tiles& tiles, const Walk& walk, float* grad_q_sum,
                         int* turns, int adder) {
  Cursor<STAGES> at;
  Position position(walk);
#pragma unroll 1
  for (int step = 0; step < walk.steps; ++step) {
    const long long row = position.scratch_row(walk);
    float* const sum = grad_q_sum + query_block<HEAD_DIM>(row, adder * kColumns);
    const unsigned char* const staging =
        tiles.grad_out + at.stage * kQueryBytes + adder * 4 * kPieceBytes;
    int* const counter = turn_counter(turns, row, adder);
    begin_turn(counter, turn_of(walk, position.tile));
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      mbarrier_wait(&shared.sums.staged[adder], part);
      for (int warp = 0; warp < 4; ++warp) {
        bulk_add(sum + query_block<HEAD_DIM>(warp * 16, part * 64), staging + warp * kPieceBytes,
                 kPieceBytes);
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(part == 0 ? &shared.sums.read[adder] : &shared.grad_out.empty[at.stage]);
    }
    end_turn(counter);
    at.advance();
    position.advance(walk);
  }
}

// A warp is through with what the barrier guards.
CUKIT_DEVICE void leave(Mbarrier& read) {
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&read);
}

// What both warpgroups know of their share. Descriptors are sums of `first` and constants: there are
// no registers to keep them in.
struct Share {
  int group, warp, lane_column;
  unsigned long long first;  // inner_descriptor of all tiles

  CUKIT_DEVICE Share(const Tiles& tiles, int group)
      : group(group),
        warp(threadIdx.x % kGroupThreads / kWarpSize),
        lane_column(threadIdx.x % 4 * 2),
        first(inner_descriptor(tiles.k)) {}

  // The same, of which the compiler derives nothing ahead of time: it would have to spill it.
  CUKIT_DEVICE Share rederived() const {
    Share share = *this;
    const unsigned low = opaque(static_cast<unsigned>(first));
    share.first = (first >> 32 << 32) + low;
    return share;
  }

  CUKIT_DEVICE unsigned long long inner(int at) const { return first + at / 16; }

  // outer_descriptor: another distance between the parts.
  CUKIT_DEVICE unsigned long long outer(int at, int part_bytes) const {
    return first + at / 16 + (static_cast<unsigned long long>(part_bytes / 16 - 1) << 16);
  }

  // P or dS of a stage, keys as rows.
  CUKIT_DEVICE unsigned long long scores(int at, int parity) const {
    return inner(at) + parity * kScoreStage;
  }

  // The share's columns of a stage of Q or dO.
  CUKIT_DEVICE unsigned long long columns(int at, int stage) const {
    return outer(at, kQueryPart) + (stage * kQueryStage + group * (2 * kQueryPart / 16));
  }

  // dS of a stage, queries as rows; a part of the share's columns of K.
  CUKIT_DEVICE unsigned long long queries(int parity) const {
    return outer(kDerivativesAt, kKeyPart) + parity * kScoreStage;
  }
  CUKIT_DEVICE unsigned long long keys(int part) const {
    return outer(part * kKeyPart, kKeyPart) + group * (2 * kKeyPart / 16);
  }

  // Where a part of the warp's share of dQ is staged: in the tile of dO.
  CUKIT_DEVICE unsigned char* staging(const Tiles& tiles, int stage) const {
    return tiles.grad_out + stage * kQueryBytes + (group * 4 + warp) * kPieceBytes;
  }
};

// The first warpgroup.
CUKIT_DEVICE void accumulate_scores(KeyGradient& dk, KeyGradient& dv, Shared& shared,
                                    const Tiles& tiles, const Walk& walk, const Share& all,
                                    int steps, float scale_log2) {
  const Share& share = all;
  const int key = share.warp * 16 + threadIdx.x % kWarpSize / 4;
  Cursor<STAGES> at;
  Position position(walk);

  const int warp_row = share.warp * 16;
  const auto tile_at = [&](const Position& place) {
    return TileScores(walk, place.head, warp_uniform(place.tile), warp_row);
  };
  Fetched fetched;

  // From the scores of the tile at `position` to P.
  const auto hand_over = [&](Scores& s, int stage) {
    const TileScores tile = tile_at(position);
    // dS of two tiles before is no longer read: the ring of Q has come round since.
    const ScoreRows ds_rows(tiles.scores + (2 + stage) * kScoreBytes, warp_row);
    Packed p;
    prepare(s, ds_rows, walk, tile, fetched, key, scale_log2);
    exponentiate(s, p, shared.lse[at.stage] + share.lane_column, ds_rows, tile, scale_log2);
    ScoreRows(tiles.scores + stage * kScoreBytes, warp_row).store(p);
    fence_proxy_async();
    named_sync(kOwn, kGroupThreads);
    named_arrive(kProbabilities + stage, kConsumers * kGroupThreads);
  };

  fetched.ask(tile_at(position));
  mbarrier_wait(&shared.keys, 0);
  mbarrier_wait(&shared.q.full[0], 0);
  {
    Scores s;
    wgmma_fence();
    multiply_keys<COLUMNS>(s, share.inner(0), share.inner(kQueriesAt));
    wgmma_wait<0>(s);
    hand_over(s, 0);
  }

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    float dq[kColumns / 2];
    const int parity = step % 2;
    const Cursor<STAGES> now = at;
    mbarrier_wait(&shared.grad_out.full[now.stage], now.parity);
    at.advance();
    position.advance(walk);
    wgmma_fence();
    multiply_queries<share_of(VALUE_COLUMNS, 0)>(dv, share.scores(kProbabilitiesAt, parity), share.columns(kGradOutAt, now.stage));
    if (step + 1 < steps) {
      Scores s;
      fetched.ask(tile_at(position));
      mbarrier_wait(&shared.q.full[at.stage], at.parity);
      wgmma_fence();
      multiply_keys<COLUMNS>(s, share.inner(0), share.inner(kQueriesAt) + at.stage * kQueryStage);
      wgmma_wait<0>(s);
      hand_over(s, parity ^ 1);
    }
    wgmma_wait<0>(dv);
    leave(shared.sums.grad_out_read[now.stage]);
    named_sync(kDerivatives + parity, kConsumers * kGroupThreads);
    mbarrier_wait(&shared.sums.grad_out_read[now.stage], now.parity);
    wgmma_fence();
    multiply_scores<share_of(COLUMNS, 0)>(dq, share.queries(parity), share.keys(0));
    multiply_queries<share_of(COLUMNS, 0)>(dk, share.scores(kDerivativesAt, parity), share.columns(kQueriesAt, now.stage));
    wgmma_wait<1>(dq);
    stage_piece(share.staging(tiles, now.stage), dq, 0, &shared.sums.staged[0]);
    wgmma_wait<0>(dk);
    release(shared.q, now);
    mbarrier_wait(&shared.sums.read[0], step % 2);
    stage_piece(share.staging(tiles, now.stage), dq, kColumns / 4, &shared.sums.staged[0]);
  }
}

// The second warpgroup.
CUKIT_DEVICE void accumulate_derivatives(KeyGradient& dk, KeyGradient& dv, Shared& shared,
                                         const Tiles& tiles, const Walk& walk, const Share& all,
                                         int steps) {
  Cursor<STAGES> at;
  Position position(walk);
  Scores dp;

  mbarrier_wait(&shared.values, 0);
  mbarrier_wait(&shared.keys, 0);
  mbarrier_wait(&shared.grad_out.full[0], 0);
  wgmma_fence();
  multiply_keys<VALUE_COLUMNS>(dp, all.inner(kValuesAt), all.inner(kGradOutAt));
  wgmma_wait<0>(dp);

#pragma unroll 1
  for (int step = 0;;) {
    QueryGradient dq;
    const Share share = all.rederived();
    const int parity = step % 2;
    const Cursor<STAGES> now = at;
    named_sync(kProbabilities + parity, kConsumers * kGroupThreads);
    wgmma_fence();
    multiply_queries<share_of(VALUE_COLUMNS, 1)>(dv, share.scores(kProbabilitiesAt, parity), share.columns(kGradOutAt, now.stage));
    differentiate(tiles.scores + (2 + parity) * kScoreBytes, tiles.scores + parity * kScoreBytes,
                  share.warp * 16, dp, shared.delta[now.stage] + share.lane_column);
    fence_proxy_async();
    wgmma_wait<0>(dv);
    leave(shared.sums.grad_out_read[now.stage]);
    named_sync(kOwn + 1, kGroupThreads);
    named_arrive(kDerivatives + parity, kConsumers * kGroupThreads);

    mbarrier_wait(&shared.q.full[now.stage], now.parity);
    mbarrier_wait(&shared.sums.grad_out_read[now.stage], now.parity);
    const bool more = step + 1 < steps;
    if (more) {
      at.advance();
      position.advance(walk);
      mbarrier_wait(&shared.grad_out.full[at.stage], at.parity);
    }
    wgmma_fence();
    multiply_queries<share_of(COLUMNS, 1)>(dk, share.scores(kDerivativesAt, parity), share.columns(kQueriesAt, now.stage));
    multiply_scores<columns_from(COLUMNS, 128, 64)>(dq, share.queries(parity), share.keys(0));
    // After the last tile something else, V itself: a path of its own costs registers.
    const unsigned long long values = share.inner(kValuesAt);
    const unsigned long long next =
        more ? share.inner(kGradOutAt) + at.stage * kQueryStage : values;
    multiply_keys<VALUE_COLUMNS>(dp, values, next);
    wgmma_wait<1>(dq);
    stage_piece(share.staging(tiles, now.stage), dq, 0, &shared.sums.staged[1]);
    wgmma_wait<0>(dp);
    wgmma_fence();
    multiply_scores<columns_from(COLUMNS, 192, 64)>(dq, share.queries(parity), share.keys(1));
    wgmma_wait<0>(dq);
    wgmma_wait<0>(dk);
    release(shared.q, now);
    mbarrier_wait(&shared.sums.read[1], parity);
    stage_piece(share.staging(tiles, now.stage), dq, 0, &shared.sums.staged[1]);
    if (!more) break;
    ++step;
  }
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const MakeResults& make_results, float scale_log2) {
  const int group = warp_uniform(threadIdx.x / kGroupThreads) - 1;
  const int steps = warp_uniform(walk.steps);
  const Share share(tiles, group);
  KeyGradient dk, dv;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0.0f;
  if (steps > 0) {
    if (group == 0) {
      accumulate_scores(dk, dv, shared, tiles, walk, share, steps, scale_log2);
    } else {
      accumulate_derivatives(dk, dv, shared, tiles, walk, share, steps);
    }
  }
  const Results results = make_results();
  const int key = share.warp * 16 + threadIdx.x % kWarpSize / 4;
  store<PADDED>(results.k, dk, results.keys_left, key, group * kColumns);
  store<VALUE_PADDED>(results.v, dv, results.keys_left, key, group * kColumns);
}

}  // namespace cukit::backward
