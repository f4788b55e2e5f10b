// Accumulation of dQ in global memory by the Hopper backward: consumers stage tiles in shared
// memory, and warps of the producer warpgroup (adders) issue TMA reductions, so that no consumer
// waits for memory.
//
// The first block to reach a tile of the sum stores instead of adding, so that the sum need not be
// zeroed. Each tile has a counter:
//   DETERMINISTIC: the number of blocks that have added. Blocks add in a fixed order: an adder
//     waits for its block's turn, then for the end of its own copy, and increments the counter. In
//     causal calls blocks reach a tile in this order anyway.
//   otherwise: 0 not yet stored, kStoring being stored, kStored stored.
// The finish kernel reads tiles whose counter is 0 as zeros.
//
// Macros: HEAD_DIM, TILE_M, TILE_N, CAUSAL, DETERMINISTIC.
#pragma once

#include "attention/backward_pipelines.cuh"
#include "attention/query_gradient.cuh"
#include "common/platform.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/tma.cuh"

namespace cukit::backward {

constexpr int kQueryBlockBytes = kQueryBlock * 4;

// Stores the warp's part of dQ to the staging tile, block after block.
template <int N>
CUKIT_DEVICE void stage_blocks(unsigned char* staging, const float (&dq)[N]) {
  float4* const to = reinterpret_cast<float4*>(staging) + threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
    to[n * kWarpSize] = make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
  }
}

// Signals the adder that this warp has staged its part.
CUKIT_DEVICE void signal_adder(Sums& sums, const PipelineState<kAdders>& state) {
  fence_proxy_async();
  __syncwarp();
  sums.staged.arrive_warp(state);
}

// DETERMINISTIC: the number of blocks that add to a tile of dQ before this one. With CAUSAL or
// WINDOW the last visible keys come first, otherwise the first keys: the order in which blocks
// reach the tile anyway.
CUKIT_DEVICE int turn_of(const Work& work, const ScoreSettings& settings, int tile) {
  const int key_tile = work.first_key / TILE_N;
  if (!CAUSAL && !WINDOW) return key_tile;
  const int right = CAUSAL ? 0 : settings.window_right;
  const int last_visible = (tile * TILE_M + TILE_M - 1 + work.causal_offset + right) / TILE_N;
  return min(work.key_tiles - 1, last_visible) - key_tile;
}

// An adder's access to a tile of the sum. Waiting for other blocks cannot deadlock: they started
// earlier, or are storing already.
class SumAccess {
 public:
  // `counters` of the kernel: the ticket counter, then one per tile.
  CUKIT_DEVICE SumAccess(int* counters, int scratch_tile) : counter_(counters + 1 + scratch_tile) {}

  // Call as early as possible, before the tile has been staged: the load of the counter has a long
  // latency.
  CUKIT_DEVICE void begin(const Work& work, const ScoreSettings& settings, int tile) {
    if constexpr (DETERMINISTIC) {
      const int turn = turn_of(work, settings, tile);
      first_ = turn == 0;
      wait_for(turn);
    } else {
      stored_ = load_acquire(counter_) == kStored;
    }
    fence_proxy_async_global();
  }

  // Call after the tile has been staged, before the copies.
  CUKIT_DEVICE void enter() {
    if constexpr (!DETERMINISTIC) {
      if (stored_) return;
      first_ = atomicCAS(counter_, 0, kStoring) == 0;
      if (!first_) {
        wait_for(kStored);
        fence_proxy_async_global();
      }
    }
  }

  CUKIT_DEVICE void add(float* to, const unsigned char* staged, unsigned bytes) const {
    if (first_) {
      bulk_store(to, staged, bytes);
    } else {
      bulk_add(to, staged, bytes);
    }
  }

  // Call after the copies.
  CUKIT_DEVICE void end() {
    if (DETERMINISTIC || first_) {
      bulk_wait<0>();
      fence_proxy_async_global();
      add_release(counter_, 1);
    }
  }

 private:
  static constexpr int kStoring = 1, kStored = 2;

  CUKIT_DEVICE void wait_for(int value) const {
    while (load_acquire(counter_) != value) {
    }
  }

  int* counter_;
  bool first_ = false, stored_ = false;
};

}  // namespace cukit::backward
