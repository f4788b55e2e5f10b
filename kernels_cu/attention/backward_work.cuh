// The tile scheduler of the Hopper backward: work items from an atomic counter.
//
// Each block takes tickets from the counter. A ticket is the index of a tile of keys in the order
// of block_order.cuh.
// VARLEN: plan_sequences.cu has sorted the sequences, those with the most queries first, and
// computed prefix sums of their tiles of keys.
//
// Macros: those of backward_pipelines.cuh; DETERMINISTIC 0|1.
#pragma once

#include "attention/backward_pipelines.cuh"
#include "attention/block_order.cuh"
#include "attention/parameters.cuh"
#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace cukit::backward {

// The arguments of a call, and its work items.
struct KeyProblem {
  const MappedKeyParameters& call;
  const int* cu_seqlens_q;
  const int* cu_seqlens_kv;
  const int* plan;  // VARLEN: [2 * batch + 2], plan_sequences.cu

  CUKIT_DEVICE int work_items() const {
    if constexpr (VARLEN) return plan[1 + call.batch];
    return call.batch * call.heads * ((call.seq_kv + TILE_N - 1) / TILE_N);
  }

  CUKIT_DEVICE Work work(int ticket) const {
    Work work;
    Sequence sequence{0, 0, call.seq_q, call.seq_kv};
    HeadTile found;
    if constexpr (VARLEN) {
      const int* const starts = plan + 1;
      const int* const order = starts + call.batch + 1;
      int place = 0;  // the last sequence that starts at or before this ticket
      for (int end = call.batch; end - place > 1;) {
        const int middle = (place + end) / 2;
        (starts[middle] <= ticket ? place : end) = middle;
      }
      work.batch = order[place];
      sequence = sequence_of(work.batch, cu_seqlens_q, cu_seqlens_kv, 0, 0);
      work.key_tiles = (sequence.seq_kv + TILE_N - 1) / TILE_N;
      found = head_tile(ticket - starts[place], call.heads, work.key_tiles,
                        call.raster_group_heads);
      work.head = found.head;
    } else {
      work.key_tiles = (sequence.seq_kv + TILE_N - 1) / TILE_N;
      found = head_tile(ticket, call.batch * call.heads, work.key_tiles, call.raster_group_heads);
      work.batch = found.head / call.heads;
      work.head = found.head - work.batch * call.heads;
    }
    // CAUSAL or WINDOW, DETERMINISTIC: a work item adds to dQ after the work items with later keys
    // (turn_of), which therefore have earlier tickets.
    const int tile =
        (CAUSAL || WINDOW) && DETERMINISTIC ? work.key_tiles - 1 - found.tile : found.tile;
    work.key_head = work.head / call.splits;
    work.first_key = tile * TILE_N;
    work.keys_left = sequence.seq_kv - work.first_key;
    work.causal_offset = sequence.seq_kv - sequence.seq_q;
    work.first_head = work.head * call.group;
#if DISTILL
    work.value_head = work.first_head / call.teacher_group;
#endif
    work.tiles = call.rows_per_head / TILE_M;
    if constexpr (VARLEN) {
      work.map_q = {call.seq_q - sequence.seq_q, sequence.first_q + sequence.seq_q};
      work.map_kv = {call.seq_kv - sequence.seq_kv, sequence.first_kv + sequence.seq_kv};
      work.key_row = sequence.first_kv + work.first_key;
      work.first_scratch_tile =
          work.first_head * work.tiles + scratch_start(work.batch, sequence.first_q) / TILE_M;
    } else {
      work.map_q = work.map_kv = {0, work.batch};
      work.key_row = work.batch * call.seq_kv + work.first_key;
      work.first_scratch_tile = (work.batch * call.heads + work.head) * call.group * work.tiles;
    }
    work.first_tile =
        CAUSAL ? min(work.tiles, max(0, work.first_key - work.causal_offset) / TILE_M) : 0;
    work.end_tile = work.tiles;
    if constexpr (WINDOW || VARLEN) {
      const TileRange visible =
          query_tiles<TILE_M>(work.first_key, min(TILE_N, work.keys_left), work.causal_offset,
                              sequence.seq_q, call.settings);
      work.first_tile = visible.begin;
      work.end_tile = visible.end;
    }
    work.steps = (work.end_tile - work.first_tile) * call.group;
    work.start_tile = CAUSAL || WINDOW || DETERMINISTIC || work.end_tile == 0
                          ? work.first_tile
                          : tile % work.end_tile;
    return work;
  }
};

// ---- Distribution of work items to the warps of a block ----

constexpr int kNoWork = -1;  // steps

// The first producer warp: takes tickets from a counter that starts at 0, publishes the work items
// to the other warps and calls produce(work) for each, until none is left.
template <typename Produce>
CUKIT_DEVICE void schedule_work(Shared& shared, const KeyProblem& problem, int* counter,
                             const Produce& produce) {
  const int work_items = problem.work_items();
  for (PipelineState<kWorkStages> state;; state.advance()) {
    Work& work = shared.work[state.index];
    shared.work_pipeline.acquire(state);
    if (threadIdx.x == 0) {
      const int ticket = atomicAdd(counter, 1);
      if (ticket < work_items) {
        work = problem.work(ticket);
      } else {
        work.steps = kNoWork;
      }
      shared.work_pipeline.commit(state);
    }
    __syncwarp();
    if (warp_uniform(work.steps) == kNoWork) return;
    produce(warp_uniform_ints(work));
  }
}

// Every other warp: calls consume(work, work in shared memory) for each work item.
template <typename Consume>
CUKIT_DEVICE void for_each_work(Shared& shared, const Consume& consume) {
  for (PipelineState<kWorkStages> state;; state.advance()) {
    shared.work_pipeline.wait(state);
    const Work& work = shared.work[state.index];
    if (warp_uniform(work.steps) == kNoWork) return;
    consume(warp_uniform_ints(work), work);
    __syncwarp();
    shared.work_pipeline.release(state);
  }
}

}  // namespace cukit::backward
