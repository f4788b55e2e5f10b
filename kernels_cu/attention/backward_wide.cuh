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
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

constexpr int kScoreBytes = kKeyPart;
constexpr int kScoreTiles = 4;  // two stages of P, two of dS
constexpr int kColumns = HEAD_DIM / kConsumers;
// Named barriers, two each, as the first warpgroup is ahead by one: P is in shared memory; dS is, and
// P is no longer read; and one for each warpgroup's own threads.
constexpr int kProbabilities = 1;
constexpr int kDerivatives = 3;
constexpr int kOwn = 5;

static_assert(TILE_N == 64 && TILE_M == 64, "one product of 64 rows each way");
static_assert(kColumns == 128, "two parts of 64 columns for each warpgroup");

using KeyGradient = float[kColumns / 2];

// This warpgroup's columns of dV += P^T dO or dK += dS^T Q, started.
CUKIT_DEVICE void multiply_queries(KeyGradient& sums, unsigned long long scores,
                                   unsigned long long queries) {
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    wgmma<T, kColumns, false, true>(sums, scores + step * 32 / 16,
                                    queries + step * 16 * kRowBytes / 16, true);
  }
  wgmma_commit();
}

// Columns of dQ = dS K, started.
template <int N>
CUKIT_DEVICE void multiply_scores(float (&dq)[N], unsigned long long ds, unsigned long long keys) {
#pragma unroll
  for (int step = 0; step < TILE_N / 16; ++step) {
    wgmma<T, 2 * N, true, true>(dq, ds + step * 16 * kRowBytes / 16,
                                keys + step * 16 * kRowBytes / 16, step > 0);
  }
  wgmma_commit();
}

// dS = P * (dP - delta), sixteen queries at a time for want of registers: from one tile to the other.
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
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + 16 * step + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* g = &dp[8 * step + 4 * n + 2 * half];
        float pair[2];
        unpack<T>(pair, p[2 * n + half]);
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

// What both warpgroups know of their share. Descriptors are sums of `first` and constants: there are
// no registers to keep them in.
struct Share {
  int group, warp, lane_column;
  unsigned long long first;  // inner_descriptor of all tiles
  float* grad_q_sum;
  int* turns;

  CUKIT_DEVICE Share(const Tiles& tiles, float* grad_q_sum, int* turns, int group)
      : group(group),
        warp(threadIdx.x % kGroupThreads / kWarpSize),
        lane_column(threadIdx.x % 4 * 2),
        first(inner_descriptor(tiles.k)),
        grad_q_sum(grad_q_sum),
        turns(turns) {}

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

  // DETERMINISTIC: before the warp adds to its rows, and after.
  CUKIT_DEVICE void begin_to_add(int* counter, int turn) const {
    if constexpr (DETERMINISTIC) {
      if (threadIdx.x % kWarpSize == 0) await_turn(counter, turn);
      __syncwarp();
    }
  }
  CUKIT_DEVICE void end_to_add(int* counter) const {
    if constexpr (DETERMINISTIC) {
      __threadfence();
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) add_release(counter, 1);
    }
  }
  CUKIT_DEVICE int* counter(const Walk& walk, const Position& position) const {
    return turn_counter(turns, position.scratch_row(walk), group * 4 + warp);
  }

  // The warp's rows of the share of dQ.
  CUKIT_DEVICE float* sum(const Walk& walk, const Position& position) const {
    return grad_q_sum +
           query_block<HEAD_DIM>(position.scratch_row(walk) + warp * 16, group * kColumns);
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

  // From the scores of the tile at `position` to P.
  const auto hand_over = [&](Scores& s, int stage) {
    hide(s, walk, key, warp_uniform(position.tile));
    Packed p;
    exponentiate(s, p, shared.lse[at.stage] + share.lane_column, scale_log2);
    store_scores(tiles.scores + stage * kScoreBytes, share.warp * 16, p);
    fence_proxy_async();
    named_sync(kOwn, kGroupThreads);
    named_arrive(kProbabilities + stage, kConsumers * kGroupThreads);
  };

  mbarrier_wait(&shared.keys, 0);
  mbarrier_wait(&shared.q.full[0], 0);
  {
    Scores s;
    wgmma_fence();
    multiply_keys(s, share.inner(0), share.inner(kQueriesAt));
    wgmma_wait<0>(s);
    hand_over(s, 0);
  }

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    float dq[kColumns / 2];
    const int parity = step % 2;
    const Cursor<STAGES> now = at;
    float* const sum = share.sum(walk, position);
    int* const counter = share.counter(walk, position);
    const int turn = turn_of(walk, position.tile);
    mbarrier_wait(&shared.grad_out.full[now.stage], now.parity);
    at.advance();
    position.advance(walk);
    wgmma_fence();
    multiply_queries(dv, share.scores(kProbabilitiesAt, parity), share.columns(kGradOutAt, now.stage));
    if (step + 1 < steps) {
      Scores s;
      mbarrier_wait(&shared.q.full[at.stage], at.parity);
      wgmma_fence();
      multiply_keys(s, share.inner(0), share.inner(kQueriesAt) + at.stage * kQueryStage);
      wgmma_wait<0>(s);
      hand_over(s, parity ^ 1);
    }
    named_sync(kDerivatives + parity, kConsumers * kGroupThreads);
    wgmma_wait<0>(dv);
    wgmma_fence();
    multiply_scores(dq, share.queries(parity), share.keys(0));
    multiply_queries(dk, share.scores(kDerivativesAt, parity), share.columns(kQueriesAt, now.stage));
    wgmma_wait<1>(dq);
    share.begin_to_add(counter, turn);
    add_query_gradient(sum, dq);
    share.end_to_add(counter);
    wgmma_wait<0>(dk);
    release(shared.q, now);
    release(shared.grad_out, now);
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
  multiply_keys(dp, all.inner(kValuesAt), all.inner(kGradOutAt));
  wgmma_wait<0>(dp);

#pragma unroll 1
  for (int step = 0;;) {
    QueryGradient dq;
    const Share share = all.rederived();
    const int parity = step % 2;
    const Cursor<STAGES> now = at;
    float* const sum = share.sum(walk, position);
    int* const counter = share.counter(walk, position);
    const int turn = turn_of(walk, position.tile);
    named_sync(kProbabilities + parity, kConsumers * kGroupThreads);
    wgmma_fence();
    multiply_queries(dv, share.scores(kProbabilitiesAt, parity), share.columns(kGradOutAt, now.stage));
    differentiate(tiles.scores + (2 + parity) * kScoreBytes, tiles.scores + parity * kScoreBytes,
                  share.warp * 16, dp, shared.delta[now.stage] + share.lane_column);
    fence_proxy_async();
    wgmma_wait<0>(dv);
    named_sync(kOwn + 1, kGroupThreads);
    named_arrive(kDerivatives + parity, kConsumers * kGroupThreads);

    mbarrier_wait(&shared.q.full[now.stage], now.parity);
    const bool more = ++step < steps;
    if (more) {
      at.advance();
      position.advance(walk);
      mbarrier_wait(&shared.grad_out.full[at.stage], at.parity);
    }
    wgmma_fence();
    multiply_queries(dk, share.scores(kDerivativesAt, parity), share.columns(kQueriesAt, now.stage));
    multiply_scores(dq, share.queries(parity), share.keys(0));
    // After the last tile this one's once more: a path of its own costs registers.
    multiply_keys(dp, share.inner(kValuesAt), share.inner(kGradOutAt) + at.stage * kQueryStage);
    wgmma_wait<1>(dq);
    share.begin_to_add(counter, turn);
    add_query_gradient(sum, dq);
    wgmma_wait<0>(dp);
    wgmma_fence();
    multiply_scores(dq, share.queries(parity), share.keys(1));
    wgmma_wait<0>(dq);
    wgmma_wait<0>(dk);
    release(shared.q, now);
    release(shared.grad_out, now);
    add_query_gradient(sum + 8 * kQueryBlock, dq);
    share.end_to_add(counter);
    if (!more) break;
  }
}

template <typename MakeResults>
CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const MakeResults& make_results, float* grad_q_sum, int* turns,
                             float scale_log2) {
  const int group = warp_uniform(threadIdx.x / kGroupThreads) - 1;
  const int steps = warp_uniform(walk.steps);
  const Share share(tiles, grad_q_sum, turns, group);
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
  store(results.grad_k, dk, results.scale, results, key, group * kColumns);
  store(results.grad_v, dv, 1.0f, results, key, group * kColumns);
}

}  // namespace cukit::backward
