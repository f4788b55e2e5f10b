// How dQ leaves a block of the Hopper backward: consumers stage it in shared memory, threads of the
// producer warpgroup (adders) have TMA add it to global memory, so that no consumer waits for memory.
//
// The first block that comes to a tile of the sum stores it, so that nobody has to write zeros before. A
// counter for each tile says how far its sum is:
//   DETERMINISTIC: how many blocks have added. Blocks add in a fixed order: an adder awaits its block's
//     turn, the end of its copy, and then announces the next block's. In causal calls blocks come to a
//     tile in this order by themselves.
//   else: none has stored (0), one is storing (kStoring), one has stored (kStored).
// The finishing kernel takes tiles whose counter is 0 for zeros.
//
// Macros: HEAD_DIM, TILE_M, TILE_N, CAUSAL, DETERMINISTIC.
#pragma once

#include "attention/backward_walk.cuh"
#include "attention/query_gradient.cuh"
#include "common/platform.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/tma.cuh"

namespace cukit::backward {

constexpr int kQueryBlockBytes = kQueryBlock * 4;

// Stages what a warp has of dQ, block after block.
template <int N>
CUKIT_DEVICE void stage_blocks(unsigned char* staging, const float (&dq)[N]) {
  float4* const to = reinterpret_cast<float4*>(staging) + threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
    to[n * kWarpSize] = make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
  }
}

// The warp has staged what it has for an adder.
CUKIT_DEVICE void hand_to_adder(Sums& sums, const PipelineState<kAdders>& state) {
  fence_proxy_async();
  __syncwarp();
  sums.staged.arrive_warp(state);
}

// How many blocks add to dQ of a tile before this one, where their order is fixed: the last keys that
// are seen come first if a query's place decides which, else the first. So they come to it in this
// order by themselves.
CUKIT_DEVICE int turn_of(const Work& work, const ScoreSettings& settings, int tile) {
  const int key_tile = work.first_key / TILE_N;
  if (!CAUSAL && !WINDOW) return key_tile;
  const int right = CAUSAL ? 0 : settings.window_right;
  const int last_seen = (tile * TILE_M + TILE_M - 1 + work.causal_offset + right) / TILE_N;
  return min(work.key_tiles - 1, last_seen) - key_tile;
}

// An adder's access to a tile of the sum. Other blocks may be waited for: they have begun before, or
// are storing at this moment.
class SumAccess {
 public:
  // `counters` of the kernel: one for the works, then those of the tiles.
  CUKIT_DEVICE SumAccess(int* counters, int scratch_tile) : counter_(counters + 1 + scratch_tile) {}

  // Before what is to be added has been staged: as early as possible, it takes its time.
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

  // After it has been staged, before the copies.
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

  // After the copies.
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
