// Lists the tiles of keys visible to each tile of queries under a block mask (block_lists.cuh).
//
// Mapping: one warp per tile of queries and head of the mask; its lanes check 32 tiles of keys at a
//   time and append the visible ones.
// Shared memory: none.
// Macros: TILE_M, TILE_N queries and keys of a tile; BLOCK_Q, BLOCK_KV of a block of the mask;
//   CAUSAL 0|1, WINDOW 0|1 (score_options.cuh) also mask keys; THREADS; HEAD_DIM and PADDED have no
//   effect.
// Deterministic.
// Reference: tests/attention/test_block_sparse_attention.py.
#include "attention/block_lists.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) plan_blocks(
    const unsigned char* __restrict__ block_mask,  // [mask_heads, blocks of queries, of keys]
    int* __restrict__ plan,                        // next work | lists (block_lists.cuh)
    int mask_heads, int seq_q, int seq_kv,
    int blocks,  // of the attention kernel's grid; block i starts with work item i
    const __grid_constant__ cukit::ScoreSettings settings) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int tiles_q = (seq_q + TILE_M - 1) / TILE_M;
  const int tiles_kv = (seq_kv + TILE_N - 1) / TILE_N;
  const int place = static_cast<int>((blockIdx.x * THREADS + threadIdx.x) / cukit::kWarpSize);
  if (blockIdx.x == 0 && threadIdx.x == 0) plan[0] = blocks;
  if (place >= mask_heads * tiles_q) return;

  const int head = place / tiles_q;
  const int first_row = place % tiles_q * TILE_M;
  const int rows = min(TILE_M, seq_q - first_row);
  const cukit::TileRange range =
      cukit::key_tiles<TILE_N>(first_row, rows, seq_kv - seq_q, seq_kv, settings);
  const cukit::BlockMask mask({nullptr, block_mask, mask_heads, seq_q, seq_kv}, head);
  int* const list = plan + 1 + static_cast<long long>(place) * (1 + tiles_kv);
  int count = 0;
  for (int first = range.begin; first < range.end; first += cukit::kWarpSize) {
    const int tile = first + lane;
    bool some = false;
    bool all = range.unmasked(tile);
    if (tile < range.end) {
      const int last_key = min((tile + 1) * TILE_N, seq_kv) - 1;
      for (int i = first_row / BLOCK_Q; i <= (first_row + rows - 1) / BLOCK_Q; ++i) {
        for (int j = tile * TILE_N / BLOCK_KV; j <= last_key / BLOCK_KV; ++j) {
          const bool visible = mask.visible(i, j);
          some |= visible;
          all &= visible;
        }
      }
    }
    const unsigned listed = __ballot_sync(cukit::kFullMask, some);
    const int before = __popc(listed & ((1u << lane) - 1));
    if (some) list[1 + count + before] = 2 * tile + (all ? 0 : 1);
    count += __popc(listed);
  }
  if (lane == 0) {
    if (count == 0) list[1] = 1;  // the first tile, fully masked
    list[0] = max(1, count);
  }
}
