// Work items of the Hopper backward, its pipelines, and the warp that issues the loads.
//
// Blocks are persistent, one per SM. Each processes one work item (a tile of keys of a head) after
// the other. The loads of the next item start while the consumers finish the current one.
//
// Macros: HEAD_DIM, at least COLUMNS and VALUE_COLUMNS; COLUMNS of Q and K and VALUE_COLUMNS of V
//   and dO that are multiplied, multiples of 32, HEAD_DIM where they are not defined; TILE_M
//   queries and TILE_N keys of a tile; STAGES; QUERY_GRADIENT 0|1: dQ is accumulated too; those of
//   score_options.cuh; DISTILL, 0 where it is not defined: heads of V have a GQA group of their
//   own; ROPE, 0 where it is not defined: dK is rotated.
#pragma once

#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

#ifndef COLUMNS
#define COLUMNS HEAD_DIM
#endif
#ifndef VALUE_COLUMNS
#define VALUE_COLUMNS HEAD_DIM
#endif
#ifndef DISTILL
#define DISTILL 0
#endif
#ifndef ROPE
#define ROPE 0
#endif

namespace cukit::backward {

using T = element_t;

constexpr int kConsumers = 2;
// With 24 registers the producer's warps spill a little. With more, the consumers have fewer than
// 240 and ptxas serialises their wgmmas: 20 % slower.
using Block = WarpSpecialized<kConsumers, 24>;

// Tiles in shared memory, in parts of 64 columns. Tiles with the same row count have the same step
// offsets.
using KeyTile = SharedTile<T, TILE_N, COLUMNS>;
using ValueTile = SharedTile<T, TILE_N, VALUE_COLUMNS>;
using QueryTile = SharedTile<T, TILE_M, COLUMNS>;
using GradOutTile = SharedTile<T, TILE_M, VALUE_COLUMNS>;
// dQ is computed transposed, so that TILE_M need not be a multiple of 64.
constexpr bool kTransposed = HEAD_DIM == 128;
// P or dS: one row per key or, transposed, per query.
using ScoreTile =
    SharedTile<T, kTransposed ? TILE_M : TILE_N, kTransposed ? TILE_N : TILE_M>;

#if QUERY_GRADIENT
constexpr int kAdders = 2;

// Hand-over of dQ from the consumers to the adders, the producer warps that add it to global
// memory.
struct Sums {
  StageBarriers<kAdders> staged;  // the consumers have stored a tile to shared memory
  StageBarriers<kAdders> read;    // TMA has read it
};
#else
constexpr int kAdders = 0;
#endif

struct Tiles {
  unsigned char* k;
  unsigned char* v;
  unsigned char* q;         // stages
  unsigned char* grad_out;  // stages
  unsigned char* scores;    // P and dS
  unsigned char* dq;        // one tile, for the adders
};

// Coordinates of a sequence in a tensor map: its first row, and the index on the outermost axis.
struct MapPlace {
  int row, outer;
};

// A work item: a tile of keys of a head, and the tiles of queries that attend to these keys: for
// one query head after the other from start_tile to end_tile - 1, then from first_tile to
// start_tile - 1. Computed by the producer.
struct Work {
  MapPlace map_q, map_kv;
  int batch, key_head, first_key;
  int head;        // key_head or, with splits, one of the heads that share it
  int key_row;     // of first_key, in k
  int keys_left;   // to the end of the sequence
  int causal_offset;  // CAUSAL: query i attends to keys up to i + causal_offset
  int first_head;  // of q
#if DISTILL
  int value_head;
#endif
  int tiles;       // of queries, per head of the scratch
  int key_tiles;   // per key head
  int first_scratch_tile;  // index of the first head's first tile
  int first_tile, start_tile, end_tile, steps;
};

// A work item and its score options, as a consumer uses it.
struct ConsumerWork : Work {
  const ScoreArrays arrays;
  const ScoreSettings& settings;

  CUKIT_DEVICE ConsumerWork(const Work& work, const ScoreArrays& arrays,
                            const ScoreSettings& settings)
      : Work(work), arrays(arrays), settings(settings) {}
};

constexpr int kWorkStages = 2;  // the current work item, and the next

struct Shared {
  Pipeline<kWorkStages> work_pipeline;
  Pipeline<STAGES> q;         // with lse
  Pipeline<STAGES> grad_out;  // with delta
#if QUERY_GRADIENT
  Sums sums;
#endif
  StageBarriers<1> keys;       // K is loaded
  StageBarriers<1> values;     // V is loaded
  StageBarriers<1> keys_read;  // K and V may be overwritten
  Work work[kWorkStages];      // steps == kNoWork: no further work
  alignas(16) float lse[STAGES][TILE_M];
  alignas(16) float delta[STAGES][TILE_M];
};

// Iterates over the tiles of queries of a work item.
struct Position {
  int head = 0;
  int tile;

  CUKIT_DEVICE explicit Position(const Work& work) : tile(work.start_tile) {}

  // The tile's index, and its first row, in the scratch arrays.
  CUKIT_DEVICE int scratch_tile(const Work& work) const {
    return work.first_scratch_tile + head * work.tiles + tile;
  }
  CUKIT_DEVICE long long scratch_row(const Work& work) const {
    return static_cast<long long>(scratch_tile(work)) * TILE_M;
  }

  CUKIT_DEVICE void advance(const Work& work) {
    if (++tile == work.end_tile) tile = work.first_tile;
    if (tile == work.start_tile) ++head;
  }
};

// Pipeline states of a producer or consumer, kept from one work item to the next.
struct States {
  PipelineState<STAGES> queries;  // advances with each tile of queries
  PipelineState<1> keys;          // advances with each work item that has queries
};

// One warp: issues the loads of a work item's tiles. All lanes run the loop, converged: loop state
// then stays in uniform registers, and no lane misses a barrier phase that the first lane's loads
// complete.
CUKIT_DEVICE void fetch(Shared& shared, const Tiles& tiles, const TensorMap* q, const TensorMap* k,
                        const TensorMap* v, const TensorMap* grad_out, const float* lse_log2,
                        const float* delta, const Work& work, States& states) {
  // No box may be entirely outside the tensor: TMA would access the base address of the map, which
  // for maps of sequences (encode_sequence_map) need not be mapped memory.
  constexpr int kStatistics = TILE_M * 4;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  Position position(work);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    const PipelineState<STAGES>& state = states.queries;
    const int row = work.map_q.row + position.tile * TILE_M;
    const int head = work.first_head + position.head;
    const long long first_statistic = position.scratch_row(work);
    shared.q.acquire(state);
    __syncwarp();
    if (first_lane) {
      Mbarrier* const full = shared.q.expect(state, QueryTile::kBytes + kStatistics);
      QueryTile::load(tiles.q + state.index * QueryTile::kBytes, q, full, head, row,
                      work.map_q.outer);
      bulk_load(shared.lse[state.index], lse_log2 + first_statistic, kStatistics, full);
    }
    if (step == 0) {
      shared.keys_read.wait_previous(states.keys);
      __syncwarp();
      if (first_lane) {
        KeyTile::load(tiles.k, k, shared.keys.expect(states.keys, KeyTile::kBytes), work.key_head,
                      work.map_kv.row + work.first_key, work.map_kv.outer);
      }
    }
    shared.grad_out.acquire(state);
    __syncwarp();
    if (first_lane) {
      Mbarrier* const full = shared.grad_out.expect(state, GradOutTile::kBytes + kStatistics);
      GradOutTile::load(tiles.grad_out + state.index * GradOutTile::kBytes, grad_out, full, head,
                        row, work.map_q.outer);
      bulk_load(shared.delta[state.index], delta + first_statistic, kStatistics, full);
    }
    if (step == 0) {
      if (first_lane) {
#if DISTILL
        const int value_head = work.value_head;
#else
        const int value_head = work.key_head;
#endif
        ValueTile::load(tiles.v, v, shared.values.expect(states.keys, ValueTile::kBytes),
                        value_head, work.map_kv.row + work.first_key, work.map_kv.outer);
      }
      states.keys.advance();
    }
    states.queries.advance();
    position.advance(work);
  }
}

}  // namespace cukit::backward
