// The tile scheduler of attention kernels whose blocks iterate over tiles of queries.
//
// Dense calls use a static schedule: block b takes tiles b, b + gridDim.x, ..., head after head, so
// that concurrent blocks share keys and values in L2. With CAUSAL and without WINDOW, blocks take
// pairs of tiles of a head, the last with the first and so on, so that every pair has about the
// same number of visible keys.
//
// Where the cost of tiles differs (VARLEN, PAGED, BLOCK_SPARSE) the schedule is dynamic: an atomic
// counter assigns the tiles. With VARLEN and PAGED, plan_sequences.cu has sorted the sequences, the
// longest first. Within a head the last tile comes first.
//
// Macros: those of score_options.cuh; BLOCK_SPARSE 0|1; PING_PONG 0|1 (flash_attention_sm90.cu);
//   PAGED 0|1 keys are in a paged cache, and seq_kv is read on the device. Defines DYNAMIC_SCHEDULE
//   0|1.
#pragma once

#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile_scheduler.cuh"
#include "common/warp_uniform.cuh"

#ifndef BLOCK_SPARSE
#define BLOCK_SPARSE 0
#endif
#ifndef PING_PONG
#define PING_PONG 0
#endif

#ifndef PAGED
#define PAGED 0
#endif

#define DYNAMIC_SCHEDULE (VARLEN || BLOCK_SPARSE || PAGED)

namespace cukit {

// One tile of queries of one query head, and the tiles of keys visible to it.
struct alignas(16) QueryWork {
  Sequence sequence;
  int b, head, first_row;
  TileRange keys;  // at least one, even if it is fully masked; empty: no further work
};

// Written by plan_sequences.cu or, `next` alone, by plan_blocks.cu.
struct WorkPlan {
  int* next;          // index of the next work item; starts at the number of blocks
  const int* starts;  // [num_seqs + 1] work items before each sequence, in schedule order
  const int* order;   // [num_seqs] the sequences in schedule order
};

struct WorkProblem {
  int batch, heads_q;
  int seq_q, seq_kv;  // of all sequences; VARLEN: the longest lengths; PAGED: seq_kv: upper bound
  const int* cu_seqlens_q;
  const int* cu_seqlens_kv;  // PAGED: [batch], lengths
};

// Iterates over the work items of this block. With the dynamic schedule only one thread may call
// next(); with the static schedule every thread computes the same items.
template <int TileM, int TileN>
class QueryTileScheduler {
 public:
  CUKIT_DEVICE QueryTileScheduler(const WorkProblem& problem, const WorkPlan& plan,
                         const ScoreSettings& settings)
      : problem_(problem), plan_(plan), settings_(settings) {}

  // Tells the compiler that all lanes of the warp hold the same state.
  CUKIT_DEVICE void make_warp_uniform() { turn_ = warp_uniform(turn_); }

  // Sets `work` to the next work item; false if there is none.
  CUKIT_DEVICE bool next(QueryWork& work) {
    if constexpr (VARLEN || PAGED) {
      const int index = dynamic_.tile();
      if (index >= plan_.starts[problem_.batch]) return false;
      int sequence = 0;  // the last sequence that starts at or before the index
      for (int end = problem_.batch; end - sequence > 1;) {
        const int middle = (sequence + end) / 2;
        (plan_.starts[middle] <= index ? sequence : end) = middle;
      }
      work.b = plan_.order[sequence];
      set_sequence(work);
      set_tile_of_head(work, index - plan_.starts[sequence]);
      dynamic_.draw(plan_.next);
    } else if constexpr (BLOCK_SPARSE) {
      const int tiles = (problem_.seq_q + TileM - 1) / TileM;
      const int per_sequence = problem_.heads_q * tiles;
      const int index = dynamic_.tile();
      if (index >= problem_.batch * per_sequence) return false;
      work.b = index / per_sequence;
      set_sequence(work);
      set_tile_of_head(work, index % per_sequence);
      dynamic_.draw(plan_.next);
    } else {
      const int tiles = (problem_.seq_q + TileM - 1) / TileM;
      const int per_head = kPairs ? (tiles + 1) / 2 : tiles;
      const int index = static_tile(kPairs ? turn_ / 2 : turn_);
      if (index >= problem_.batch * problem_.heads_q * per_head) return false;
      const int early = index % per_head;
      const int late = tiles - 1 - early;
      const bool first = kPairs && turn_ % 2 == 0;
      turn_ += first && late == early ? 2 : 1;  // the tile in the middle has no partner
      const int batch_head = index / per_head;
      work.b = batch_head / problem_.heads_q;
      work.head = batch_head % problem_.heads_q;
      set_sequence(work);
      set_tile(work, first ? late : early);
    }
    return true;
  }

 private:
  static constexpr bool kPairs = CAUSAL && !WINDOW;

  CUKIT_DEVICE void set_sequence(QueryWork& work) const {
    if constexpr (PAGED) {
      const int first_q = VARLEN ? problem_.cu_seqlens_q[work.b] : 0;
      const int seq_q = VARLEN ? problem_.cu_seqlens_q[work.b + 1] - first_q : problem_.seq_q;
      work.sequence = {first_q, 0, seq_q, min(problem_.cu_seqlens_kv[work.b], problem_.seq_kv)};
    } else {
      work.sequence = sequence_of(work.b, problem_.cu_seqlens_q, problem_.cu_seqlens_kv,
                                  problem_.seq_q, problem_.seq_kv);
    }
  }

  CUKIT_DEVICE void set_tile_of_head(QueryWork& work, int index) const {
    const int tiles = (work.sequence.seq_q + TileM - 1) / TileM;
    work.head = index / tiles;
    set_tile(work, tiles - 1 - index % tiles);
  }

  CUKIT_DEVICE void set_tile(QueryWork& work, int tile) const {
    const Sequence& sequence = work.sequence;
    work.first_row = tile * TileM;
    const int rows = min(TileM, sequence.seq_q - work.first_row);
    const int causal_offset = sequence.seq_kv - sequence.seq_q;
    work.keys = key_tiles<TileN>(work.first_row, rows, causal_offset, sequence.seq_kv, settings_);
    work.keys.end = max(work.keys.end, 1);
    work.keys.begin = min(work.keys.begin, work.keys.end - 1);
  }

  const WorkProblem& problem_;
  const WorkPlan& plan_;
  const ScoreSettings& settings_;
  int turn_ = 0;          // static schedule: position among the block's work items
  DynamicTiles dynamic_;  // dynamic schedule
};

// ---- A warpgroup's share of a tile ----

// Whether the warpgroups of a block have different visible keys and skip fully masked tiles. With
// PING_PONG every warpgroup processes every tile of the work item: with TILE_N equal to TileM, at
// most one tile is fully masked for only some of the warpgroups.
constexpr bool kUneven = (CAUSAL || WINDOW) && !BLOCK_SPARSE && !PING_PONG;

// The tiles of keys visible to a warpgroup's 64 queries, at least one. Every warpgroup advances
// through the pipeline stages of all tiles of the work item; tiles at either end may be masked for
// its queries. A warpgroup beyond the last query gets a single tile.
template <int TileN>
CUKIT_DEVICE TileRange own_keys(const QueryWork& work, int first_row,
                                const ScoreSettings& settings) {
  const Sequence& sequence = work.sequence;
  TileRange visible = work.keys;
  const int rows = min(kWarpgroupRows, sequence.seq_q - first_row);
  if (rows <= 0) {
    visible.end = work.keys.begin + 1;
  } else if (kUneven) {
    const int causal_offset = sequence.seq_kv - sequence.seq_q;
    visible = key_tiles<TileN>(first_row, rows, causal_offset, sequence.seq_kv, settings);
    visible.end = max(work.keys.begin + 1, min(visible.end, work.keys.end));
    visible.begin = min(max(visible.begin, work.keys.begin), visible.end - 1);
  }
  return {WINDOW ? warp_uniform(visible.begin) : 0, warp_uniform(visible.end),
          WINDOW ? warp_uniform(visible.unmasked_begin) : 0, warp_uniform(visible.unmasked_end)};
}

}  // namespace cukit
