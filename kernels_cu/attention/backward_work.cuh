// Which keys a block of the Hopper backward owns.
//
// Blocks of a one-dimensional grid take tile after tile of the keys as block_order.cuh says. VARLEN:
// plan_sequences.cu has sorted the sequences, those with the most queries first, and added up their
// tiles of keys; the grid has room for any lengths, and blocks behind the last tile have no work.
//
// Macros: TILE_N keys of a tile; DETERMINISTIC; those of score_options.cuh.
#pragma once

#include "attention/block_order.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

// A call's sequences, as they are passed.
struct KeyProblem {
  int batch, heads;   // heads: blocks share a key head
  int seq_q, seq_kv;  // of all sequences; VARLEN: of the longest
  int section;
  const int* cu_seqlens_q;
  const int* cu_seqlens_kv;
  const int* plan;  // VARLEN: [2 * batch + 2], plan_sequences.cu

  CUKIT_DEVICE bool has_work(int block) const { return !VARLEN || block < plan[1 + batch]; }
};

struct KeyWork {
  Sequence sequence;
  int b, head, tile;
  int key_tiles;  // of the sequence
};

// Whoever asks is a whole warp.
CUKIT_DEVICE KeyWork key_work(const KeyProblem& problem, int block) {
  KeyWork work;
  HeadTile found;
  if constexpr (VARLEN) {
    const int* const starts = problem.plan + 1;
    const int* const order = starts + problem.batch + 1;
    int place = 0;  // the last one that starts at or before this block
    for (int end = problem.batch; end - place > 1;) {
      const int middle = (place + end) / 2;
      (starts[middle] <= block ? place : end) = middle;
    }
    work.b = warp_uniform(order[place]);
    const Sequence all = sequence_of(work.b, problem.cu_seqlens_q, problem.cu_seqlens_kv, 0, 0);
    work.sequence = {warp_uniform(all.first_q), warp_uniform(all.first_kv),
                     warp_uniform(all.seq_q), warp_uniform(all.seq_kv)};
    work.key_tiles = (work.sequence.seq_kv + TILE_N - 1) / TILE_N;
    found = head_tile(block - starts[place], problem.heads, work.key_tiles, problem.section);
    work.head = warp_uniform(found.head);
  } else {
    work.sequence = {0, 0, problem.seq_q, problem.seq_kv};
    work.key_tiles = (problem.seq_kv + TILE_N - 1) / TILE_N;
    found = head_tile(block, problem.batch * problem.heads, work.key_tiles, problem.section);
    // What divisions yield is not known to be the warp's.
    const int head = warp_uniform(found.head);
    work.b = warp_uniform(head / problem.heads);
    work.head = head - work.b * problem.heads;
  }
  // Blocks wait for those with later keys, which therefore begin first.
  work.tile = warp_uniform((CAUSAL || WINDOW) && DETERMINISTIC ? work.key_tiles - 1 - found.tile
                                                               : found.tile);
  return work;
}

}  // namespace cukit::backward
