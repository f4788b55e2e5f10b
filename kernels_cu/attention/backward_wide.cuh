// The two warpgroups of the Hopper backward for heads of 256 columns: 64 keys together.
//
// The first warpgroup computes P and the second dS, both with keys as rows; they hand them over through
// shared memory. Each then computes dK, dV and dQ of its half of the columns, dQ in two parts of 64,
// for want of registers. The first has the next tile's scores multiplied beside its part of dV, and
// takes their exponentials while dK and dQ are multiplied; the second has the next dP multiplied while
// it adds dQ.
// What is read while a younger product runs is read in the straight line that started it, and nothing
// runs where the loop turns: else the compiler has products run one by one.
#pragma once

#include "attention/backward_scores.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

constexpr int kScoreBytes = kKeyPart;
constexpr int kScoreTiles = 2;  // P and dS
constexpr int kBulkBlocks = CAUSAL ? 0 : 4;  // of a warp's eight of dQ, by the copy engine
constexpr int kColumns = HEAD_DIM / kConsumers;
constexpr int kProbabilities = 1;  // named barriers: P is in shared memory,
constexpr int kDerivatives = 2;    // and dS; P is no longer read
constexpr int kOwn = 3;            // the first of two, one for each warpgroup's own threads

static_assert(TILE_N == 64 && TILE_M == 64, "one product of 64 rows each way");
static_assert(kColumns == 128, "dQ: two parts of 64 columns for each warpgroup");

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

// 64 columns of dQ = dS K, started.
CUKIT_DEVICE void multiply_scores(QueryGradient& dq, unsigned long long ds, unsigned long long keys) {
#pragma unroll
  for (int step = 0; step < TILE_N / 16; ++step) {
    wgmma<T, 64, true, true>(dq, ds + step * 16 * kRowBytes / 16,
                             keys + step * 16 * kRowBytes / 16, step > 0);
  }
  wgmma_commit();
}

// What store_scores stored.
CUKIT_DEVICE void load_scores(Packed& scores, const unsigned char* tile, int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + lane % 16;
  const unsigned from = shared_address(tile) + row * kRowBytes;
#pragma unroll
  for (int step = 0; step < TILE_M / 16; ++step) {
    ldmatrix_x4(scores[step], from + ((step * 2 + lane / 16) ^ (row % 8)) * 16);
  }
}

// What both warpgroups know of their share.
struct Share {
  int group, warp, lane_column;
  unsigned long long p, ds_rows, ds_columns, k_part, q, grad_out;
  float* grad_q_sum;
  unsigned char* staging;

  CUKIT_DEVICE Share(const Tiles& tiles, float* grad_q_sum, int group)
      : group(group),
        warp(threadIdx.x % kGroupThreads / kWarpSize),
        lane_column(threadIdx.x % 4 * 2),
        p(inner_descriptor(tiles.scores)),
        ds_rows(inner_descriptor(tiles.scores + kScoreBytes)),
        ds_columns(outer_descriptor(tiles.scores + kScoreBytes, kKeyPart)),
        k_part(outer_descriptor(tiles.k + 2 * group * kKeyPart, kKeyPart)),
        q(outer_descriptor(tiles.q + 2 * group * kQueryPart, kQueryPart)),
        grad_out(outer_descriptor(tiles.grad_out + 2 * group * kQueryPart, kQueryPart)),
        grad_q_sum(grad_q_sum),
        staging(tiles.dq + (group * 4 + warp) * kBulkBlocks * kQueryBlockBytes) {}

  // The warp's rows of a part of dQ.
  CUKIT_DEVICE float* sum(const Walk& walk, const Position& position, int part) const {
    return grad_q_sum + query_block<HEAD_DIM>(position.scratch_row(walk) + warp * 16,
                                              group * kColumns + part * 64);
  }
};

constexpr unsigned long long kNextPart = kKeyPart / 16;  // of K

// The first warpgroup.
CUKIT_DEVICE void accumulate_scores(KeyGradient& dk, KeyGradient& dv, Shared& shared,
                                    const Tiles& tiles, const Walk& walk, const Share& share,
                                    int steps, int keys_left, int past, float scale_log2) {
  const unsigned long long k_rows = inner_descriptor(tiles.k);
  const unsigned long long q_rows = inner_descriptor(tiles.q);
  const int key = share.warp * 16 + threadIdx.x % kWarpSize / 4;
  Cursor<STAGES> at;
  Position position(walk);
  Scores s;
  Packed p;

  const auto probabilities = [&] {
    const int first_query = warp_uniform(position.tile) * TILE_M;
    if (keys_left < TILE_N || (CAUSAL && walk.first_key + TILE_N - 1 > first_query + past)) {
      mask(s, key, keys_left, walk.first_key + key - past - first_query);
    }
    exponentiate(s, p, shared.lse[at.stage] + share.lane_column, scale_log2);
  };
  const auto hand_over = [&] {
    store_scores(tiles.scores, share.warp * 16, p);
    fence_proxy_async();
    named_sync(kOwn, kGroupThreads);
    named_arrive(kProbabilities, kConsumers * kGroupThreads);
  };

  mbarrier_wait(&shared.keys, 0);
  mbarrier_wait(&shared.q.full[0], 0);
  wgmma_fence();
  multiply_keys(s, k_rows, q_rows);
  wgmma_wait<0>(s);
  probabilities();
  hand_over();

#pragma unroll 1
  for (int step = 0;;) {
    QueryGradient dq;
    const Cursor<STAGES> now = at;
    const Position here = position;
    const unsigned long long stage = now.stage * (kQueryBytes / 16);
    const bool more = ++step < steps;
    at.advance();
    position.advance(walk);
    mbarrier_wait(&shared.grad_out.full[now.stage], now.parity);
    if (more) mbarrier_wait(&shared.q.full[at.stage], at.parity);
    wgmma_fence();
    multiply_queries(dv, share.p, share.grad_out + stage);
    if (more) {
      multiply_keys(s, k_rows, q_rows + at.stage * (kQueryBytes / 16));
      wgmma_wait<0>(s);
    }
    named_sync(kDerivatives, kConsumers * kGroupThreads);
    wgmma_wait<0>(dv);
    wgmma_fence();
    multiply_queries(dk, share.ds_rows, share.q + stage);
    multiply_scores(dq, share.ds_columns, share.k_part);
    if (more) probabilities();
    wgmma_wait<0>(dk);
    wgmma_wait<0>(dq);
    add_query_gradient<kBulkBlocks>(share.sum(walk, here, 0), dq, share.staging);
    wgmma_fence();
    multiply_scores(dq, share.ds_columns, share.k_part + kNextPart);
    wgmma_wait<0>(dq);
    release(shared.q, now);
    release(shared.grad_out, now);
    if (more) hand_over();
    add_query_gradient<kBulkBlocks>(share.sum(walk, here, 1), dq, share.staging);
    if (!more) break;
  }
}

// The second warpgroup.
CUKIT_DEVICE void accumulate_derivatives(KeyGradient& dk, KeyGradient& dv, Shared& shared,
                                         const Tiles& tiles, const Walk& walk, const Share& share,
                                         int steps) {
  const unsigned long long v_rows = inner_descriptor(tiles.v);
  const unsigned long long grad_out_rows = inner_descriptor(tiles.grad_out);
  Cursor<STAGES> at;
  Position position(walk);
  Scores dp;

  mbarrier_wait(&shared.values, 0);
  mbarrier_wait(&shared.keys, 0);
  mbarrier_wait(&shared.grad_out.full[0], 0);
  wgmma_fence();
  multiply_keys(dp, v_rows, grad_out_rows);
  wgmma_wait<0>(dp);

#pragma unroll 1
  for (int step = 0;;) {
    Packed p, ds;
    QueryGradient dq;
    const Cursor<STAGES> now = at;
    const Position here = position;
    const unsigned long long stage = now.stage * (kQueryBytes / 16);
    named_sync(kProbabilities, kConsumers * kGroupThreads);
    wgmma_fence();
    multiply_queries(dv, share.p, share.grad_out + stage);
    load_scores(p, tiles.scores, share.warp * 16);
    differentiate(ds, p, dp, shared.delta[now.stage] + share.lane_column);
    store_scores(tiles.scores + kScoreBytes, share.warp * 16, ds);
    fence_proxy_async();
    wgmma_wait<0>(dv);
    named_sync(kOwn + 1, kGroupThreads);
    named_arrive(kDerivatives, kConsumers * kGroupThreads);

    at.advance();
    position.advance(walk);
    mbarrier_wait(&shared.q.full[now.stage], now.parity);
    if (++step == steps) {
      wgmma_fence();
      multiply_queries(dk, share.ds_rows, share.q + stage);
      multiply_scores(dq, share.ds_columns, share.k_part);
      wgmma_wait<0>(dk);
      wgmma_wait<0>(dq);
      add_query_gradient<kBulkBlocks>(share.sum(walk, here, 0), dq, share.staging);
      wgmma_fence();
      multiply_scores(dq, share.ds_columns, share.k_part + kNextPart);
      wgmma_wait<0>(dq);
      add_query_gradient<kBulkBlocks>(share.sum(walk, here, 1), dq, share.staging);
      break;
    }
    mbarrier_wait(&shared.grad_out.full[at.stage], at.parity);
    wgmma_fence();
    multiply_queries(dk, share.ds_rows, share.q + stage);
    multiply_scores(dq, share.ds_columns, share.k_part);
    multiply_keys(dp, v_rows, grad_out_rows + at.stage * (kQueryBytes / 16));
    wgmma_wait<1>(dq);
    add_query_gradient<kBulkBlocks>(share.sum(walk, here, 0), dq, share.staging);
    wgmma_wait<0>(dp);
    wgmma_fence();
    multiply_scores(dq, share.ds_columns, share.k_part + kNextPart);
    wgmma_wait<0>(dq);
    release(shared.q, now);
    release(shared.grad_out, now);
    add_query_gradient<kBulkBlocks>(share.sum(walk, here, 1), dq, share.staging);
    wgmma_wait<0>(dk);
  }
}

CUKIT_DEVICE void accumulate(Shared& shared, const Tiles& tiles, const Walk& walk,
                             const Results& results, float* grad_q_sum, int past,
                             float scale_log2) {
  const int group = warp_uniform(threadIdx.x / kGroupThreads) - 1;
  const int steps = warp_uniform(walk.steps);
  const Share share(tiles, grad_q_sum, group);
  KeyGradient dk, dv;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0.0f;
  if (steps > 0) {
    if (group == 0) {
      accumulate_scores(dk, dv, shared, tiles, walk, share, steps, results.keys_left, past,
                        scale_log2);
    } else {
      accumulate_derivatives(dk, dv, shared, tiles, walk, share, steps);
    }
    if (threadIdx.x % kWarpSize == 0) bulk_wait_read<0>();
  }
  const int key = share.warp * 16 + threadIdx.x % kWarpSize / 4;
  store(results.grad_k, dk, results.scale, results, key, group * kColumns);
  store(results.grad_v, dv, 1.0f, results, key, group * kColumns);
}

}  // namespace cukit::backward
