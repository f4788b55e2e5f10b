// Block masks of attention: which blocks of keys are visible to a block of queries.
//
// Tiles need not align with the mask's blocks. For each tile of queries plan_blocks.cu lists the
// tiles of keys that contain a visible (query, key) pair. In partially masked tiles the kernel also
// reads the mask.
//
// Macros: BLOCK_SPARSE 0|1; with 1: BLOCK_Q queries and BLOCK_KV keys of a block of the mask.
#pragma once

#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

#ifndef BLOCK_SPARSE
#define BLOCK_SPARSE 0
#endif
#if !BLOCK_SPARSE
#define BLOCK_Q 1
#define BLOCK_KV 1
#endif

namespace cukit {

struct BlockLists {
  // [mask_heads, tiles of queries, 1 + tiles of keys]: the number of listed tiles, at least 1, then
  // for each of them, in ascending order, 2 * index + (1 if the tile has a masked pair, else 0).
  const int* lists;
  const unsigned char* mask;  // [mask_heads, blocks of queries, blocks of keys]
  int mask_heads;             // 1: all heads share a mask
  int seq_q, seq_kv;

  template <int TileM, int TileN>
  CUKIT_DEVICE const int* list(int head, int tile) const {
    const int tiles = (seq_q + TileM - 1) / TileM;
    const int entries = 1 + (seq_kv + TileN - 1) / TileN;
    return lists + (static_cast<long long>(mask_heads > 1 ? head : 0) * tiles + tile) * entries;
  }
};

// The mask of one head.
struct BlockMask {
  const unsigned char* mask;
  int blocks, seq_q, seq_kv;

  CUKIT_DEVICE BlockMask(const BlockLists& all, int head)
      : mask(all.mask),
        blocks((all.seq_kv + BLOCK_KV - 1) / BLOCK_KV),
        seq_q(all.seq_q),
        seq_kv(all.seq_kv) {
    const int rows = (all.seq_q + BLOCK_Q - 1) / BLOCK_Q;
    mask += static_cast<long long>(all.mask_heads > 1 ? head : 0) * rows * blocks;
  }

  CUKIT_DEVICE bool visible(int query_block, int key_block) const {
    return mask[static_cast<long long>(query_block) * blocks + key_block] != 0;
  }

  // Masks the scores of a fragment's tile (fragment_scores.cuh) that starts at a block boundary or
  // is inside one block: reads the mask once per row and block of keys.
  template <int N, typename Place>
  CUKIT_DEVICE void mask_whole_blocks(float (&scores)[N], const Place& at) const {
    constexpr int kColumns = 2 * N;
    constexpr int kBlock = BLOCK_KV < kColumns ? BLOCK_KV : kColumns;
    const int first = (at.column - 2 * static_cast<int>(threadIdx.x % 4)) / BLOCK_KV;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query_block = min(at.row + 8 * half, seq_q - 1) / BLOCK_Q;
      bool block_visible[kColumns / kBlock];
#pragma unroll
      for (int block = 0; block < kColumns / kBlock; ++block) {
        block_visible[block] = visible(query_block, min(first + block, blocks - 1));
      }
#pragma unroll
      for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!block_visible[8 * n / kBlock]) scores[4 * n + 2 * half + i] = -infinity();
        }
    }
  }

  // Whether the key is masked for the query; false outside the sequence.
  CUKIT_DEVICE bool operator()(int row, int column) const {
    return row < seq_q && column < seq_kv && !visible(row / BLOCK_Q, column / BLOCK_KV);
  }
};

}  // namespace cukit
