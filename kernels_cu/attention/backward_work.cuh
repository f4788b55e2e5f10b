// Which keys a block of the Hopper backward owns, and who sees them.
//
// Blocks take tickets, one after the other, each for a tile of the keys in the order of
// block_order.cuh. VARLEN: plan_sequences.cu has sorted the sequences, those with the most queries
// first, and added up their tiles of keys.
//
// Macros: TILE_N keys of a tile; DETERMINISTIC; those of score_options.cuh.
#pragma once

#include "attention/backward_walk.cuh"
#include "attention/block_order.cuh"
#include "attention/parameters.cuh"
#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

struct KeyWork {
  Sequence sequence;
  int b, head, tile;
  int key_tiles;  // of the sequence
};

// A call. Whole warps ask.
struct KeyProblem {
  const MappedKeyParameters& call;
  const ScoreArrays arrays;
  const int* cu_seqlens_q;
  const int* cu_seqlens_kv;
  const int* plan;  // VARLEN: [2 * batch + 2], plan_sequences.cu

  CUKIT_DEVICE int works() const {
    if constexpr (VARLEN) return plan[1 + call.batch];
    return call.batch * call.heads * ((call.seq_kv + TILE_N - 1) / TILE_N);
  }

  CUKIT_DEVICE KeyWork work(int ticket) const {
    KeyWork work;
    HeadTile found;
    if constexpr (VARLEN) {
      const int* const starts = plan + 1;
      const int* const order = starts + call.batch + 1;
      int place = 0;  // the last one that starts at or before this ticket
      for (int end = call.batch; end - place > 1;) {
        const int middle = (place + end) / 2;
        (starts[middle] <= ticket ? place : end) = middle;
      }
      work.b = warp_uniform(order[place]);
      const Sequence all = sequence_of(work.b, cu_seqlens_q, cu_seqlens_kv, 0, 0);
      work.sequence = {warp_uniform(all.first_q), warp_uniform(all.first_kv),
                       warp_uniform(all.seq_q), warp_uniform(all.seq_kv)};
      work.key_tiles = (work.sequence.seq_kv + TILE_N - 1) / TILE_N;
      found = head_tile(ticket - starts[place], call.heads, work.key_tiles, call.section);
      work.head = warp_uniform(found.head);
    } else {
      work.sequence = {0, 0, call.seq_q, call.seq_kv};
      work.key_tiles = (call.seq_kv + TILE_N - 1) / TILE_N;
      found = head_tile(ticket, call.batch * call.heads, work.key_tiles, call.section);
      // What divisions yield is not known to be the warp's.
      const int head = warp_uniform(found.head);
      work.b = warp_uniform(head / call.heads);
      work.head = head - work.b * call.heads;
    }
    // Blocks wait for those with later keys, which therefore begin first.
    work.tile = warp_uniform((CAUSAL || WINDOW) && DETERMINISTIC ? work.key_tiles - 1 - found.tile
                                                                 : found.tile);
    return work;
  }

  CUKIT_DEVICE Walk walk(const KeyWork& work) const {
    const Sequence& sequence = work.sequence;
    Walk walk{arrays, call.settings};
    walk.batch = work.b;
    walk.key_head = work.head / call.splits;
    walk.first_key = work.tile * TILE_N;
    walk.keys_left = sequence.seq_kv - walk.first_key;
    walk.past = sequence.seq_kv - sequence.seq_q;
    walk.first_head = work.head * call.group;
    walk.tiles = call.rows_per_head / TILE_M;
    walk.key_tiles = work.key_tiles;
    if constexpr (VARLEN) {
      walk.map_q = {call.seq_q - sequence.seq_q, sequence.first_q + sequence.seq_q};
      walk.map_kv = {call.seq_kv - sequence.seq_kv, sequence.first_kv + sequence.seq_kv};
      walk.first_scratch_tile =
          walk.first_head * walk.tiles + scratch_start(work.b, sequence.first_q) / TILE_M;
    } else {
      walk.map_q = walk.map_kv = {0, work.b};
      walk.first_scratch_tile = (work.b * call.heads + work.head) * call.group * walk.tiles;
    }
    walk.first_tile = CAUSAL ? min(walk.tiles, max(0, walk.first_key - walk.past) / TILE_M) : 0;
    if constexpr (WINDOW || VARLEN) {
      const TileRange seen = query_tiles<TILE_M>(walk.first_key, min(TILE_N, walk.keys_left),
                                                 walk.past, sequence.seq_q, call.settings);
      walk.first_tile = seen.begin;
      walk.seen_end = seen.end;
    }
    walk.steps = (walk.end_tile() - walk.first_tile) * call.group;
    walk.start_tile = CAUSAL || WINDOW || DETERMINISTIC || walk.end_tile() == 0
                          ? walk.first_tile
                          : warp_uniform(work.tile % walk.end_tile());
    return walk;
  }
};

// ---- How the works of a block pass through its warps ----

// The first warp of the producers: draws tickets from a counter that starts with 0, until there is no
// work left, passes them on and calls `produce(ticket)` for each. The next one is drawn when all other
// warps have begun with the one before.
template <typename Produce>
CUKIT_DEVICE void draw_works(Shared& shared, int* counter, int works, const Produce& produce) {
  for (PipelineState<1> at;; at.advance()) {
    shared.works.acquire(at);
    int ticket = 0;
    if (threadIdx.x == 0) {
      ticket = atomicAdd(counter, 1);
      shared.ticket = ticket;
      shared.works.commit(at);
    }
    ticket = warp_uniform(ticket);
    if (ticket >= works) return;
    produce(ticket);
    __syncwarp();
  }
}

// Every other warp.
template <typename Consume>
CUKIT_DEVICE void take_works(Shared& shared, int works, const Consume& consume) {
  for (PipelineState<1> at;; at.advance()) {
    shared.works.wait(at);
    const int ticket = warp_uniform(shared.ticket);
    __syncwarp();  // all lanes have read it
    shared.works.release(at);
    if (ticket >= works) return;
    consume(ticket);
    __syncwarp();
  }
}

}  // namespace cukit::backward
