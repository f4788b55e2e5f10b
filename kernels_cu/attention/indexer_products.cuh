// Q K^T of one head for indexer_kl_sweep, and its tiles in shared memory.
//
// Scores are in the layout of mma.sync and wgmma accumulators: a warp has 16 queries, and element
// 4 n + 2 half + i of a lane is in row lane / 4 + 8 half, column 8 n + 2 (lane % 4) + i. WGMMA 0:
// the tiles are those of common/tile.cuh, and every warp reads all keys. WGMMA 1 (sm_90a): the
// tiles are stored in parts of 64 columns (common/hopper/shared_tile.cuh), and a warpgroup
// multiplies 64 queries at a time.
// Macros: DTYPE; TILE_M, TILE_N; THREADS; WGMMA 0|1.
#pragma once

#include "common/platform.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#if WGMMA
#include "common/hopper/shared_tile.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/warp_uniform.cuh"
#endif

namespace cukit {

using IndexerScores = float[1][TILE_N / 8][4];

#if WGMMA

constexpr int kPartColumns = 64;

// Bytes of a tile of `rows` rows, with `width` columns per head.
constexpr int indexer_tile_bytes(int rows, int width) {
  return rows * ((width + kPartColumns - 1) / kPartColumns * kPartColumns) * 2;
}

template <int Rows, int Width, bool Padded>
CUKIT_DEVICE void copy_head(unsigned tile, const element_t* from, long long row_stride, int rows,
                            int columns) {
  constexpr bool kPadded = Padded || Width % kPartColumns != 0;
#pragma unroll
  for (int part = 0; part * kPartColumns < Width; ++part) {
    TileCopy<Rows, kPartColumns, THREADS, kPadded>::start(
        tile + part * Rows * kPartColumns * 2, from + part * kPartColumns, row_stride, rows,
        columns - part * kPartColumns);
  }
}

// Waits for this thread's copies and makes them visible to the wgmmas that other threads issue
// after the next barrier.
CUKIT_DEVICE void publish_heads() {
  cp_async_wait<0>();
  fence_proxy_async();
}

template <int Width>
CUKIT_DEVICE void multiply_head(IndexerScores& scores, const unsigned char* q_tile,
                                const unsigned char* k_tile) {
  using Queries = SharedTile<element_t, TILE_M, Width>;
  using Keys = SharedTile<element_t, TILE_N, Width>;
  constexpr int kGroupRows = 64;
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / 128);
  const unsigned long long q =
      uniform_descriptor(Queries::k_major(q_tile)) + group * Queries::rows(kGroupRows);
  const unsigned long long k = uniform_descriptor(Keys::k_major(k_tile));
  float(&flat_scores)[TILE_N / 2] = flat(scores[0]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Width / 16; ++step) {
    wgmma<element_t, TILE_N>(flat_scores, q + Queries::k_step(step), k + Keys::k_step(step),
                             step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(flat_scores);
}

#else

constexpr int indexer_tile_bytes(int rows, int width) { return rows * width * 2; }

template <int Rows, int Width, bool Padded>
CUKIT_DEVICE void copy_head(unsigned tile, const element_t* from, long long row_stride, int rows,
                            int columns) {
  TileCopy<Rows, Width, THREADS, Padded>::start(tile, from, row_stride, rows, columns);
}

CUKIT_DEVICE void publish_heads() { cp_async_wait<0>(); }

template <int Width>
CUKIT_DEVICE void multiply_head(IndexerScores& scores, const unsigned char* q_tile,
                                const unsigned char* k_tile) {
  const int warp_row = static_cast<int>(threadIdx.x) / kWarpSize * 16;
  const LeftMK<Width> rows(shared_address(q_tile), warp_row, 0);
  const RightNK<Width> columns(shared_address(k_tile), 0, 0);
  clear(scores);
  warp_product<element_t, Width / 16>(
      scores, [&](unsigned(&r)[4], int, int step) { rows(r, 0, 16 * step); },
      [&](unsigned(&r)[4], int n, int step) { columns(r, 8 * n, 16 * step); });
}

#endif

}  // namespace cukit
