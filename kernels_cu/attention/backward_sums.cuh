// How dQ leaves a block of the Hopper backward: warps that multiply stage it in shared memory, threads of
// the copying warpgroup (adders) have the copy engine add it to global memory, so that nobody who
// multiplies waits for memory.
//
// DETERMINISTIC: blocks add to a tile of queries in a fixed order. An adder awaits its block's turn,
// the end of its copy, and then announces the next block's. In causal calls blocks come to a tile in
// this order by themselves.
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

// A warp's part of dQ, sixteen queries, that it stages at once: 64 columns.
constexpr int kPieceBlocks = 8;
constexpr int kPieceBytes = kPieceBlocks * kQueryBlockBytes;

// Stages a piece: from accumulators on, `first` being the first of them.
template <int N>
CUKIT_DEVICE void stage_piece(unsigned char* staging, const float (&dq)[N], int first,
                              Mbarrier* staged) {
  const int lane = threadIdx.x % kWarpSize;
  float4* const to = reinterpret_cast<float4*>(staging) + lane;
#pragma unroll
  for (int n = 0; n < kPieceBlocks; ++n) {
    const float* four = &dq[first + 4 * n];
    to[n * kWarpSize] = make_float4(four[0], four[1], four[2], four[3]);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(staged);
}

// How many blocks add to dQ of a tile before this one, where their order is fixed: the last keys that
// are seen come first if a query's place decides which, else the first. So they come to it in this
// order by themselves.
CUKIT_DEVICE int turn_of(const Walk& walk, int tile) {
  const int key_tile = walk.first_key / TILE_N;
  if (!CAUSAL && !WINDOW) return key_tile;
  const int right = CAUSAL ? 0 : walk.settings.window_right;
  const int last_seen = (tile * TILE_M + TILE_M - 1 + walk.past + right) / TILE_N;
  return min(walk.key_tiles - 1, last_seen) - key_tile;
}

// Counts, for each adder, the blocks that have added to a tile. The first of all counts those that have
// begun.
CUKIT_DEVICE int* turn_counter(int* turns, long long scratch_row, int adder) {
  return turns + kAdders + scratch_row / TILE_M * kAdders + adder;
}

// An adder's, before its copies: the blocks that it waits for have begun before its own.
CUKIT_DEVICE void begin_turn(const int* counter, int turn) {
  if constexpr (DETERMINISTIC) {
    while (load_acquire(counter) != turn) {
    }
    fence_proxy_async_global();
  }
}

// An adder's, after its copies.
CUKIT_DEVICE void end_turn(int* counter) {
  if constexpr (DETERMINISTIC) {
    bulk_wait<0>();
    fence_proxy_async_global();
    add_release(counter, 1);
  }
}

}  // namespace cukit::backward
