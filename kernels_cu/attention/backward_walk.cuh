// What a block of the Hopper backward walks over, and the thread that fetches it.
//
// Blocks are persistent: one for each SM, which takes one work (a tile of keys of a head) after the
// other. While the consumers end a work, the next one's tiles are already on their way.
//
// Macros: HEAD_DIM columns of a tile; COLUMNS of Q and K and VALUE_COLUMNS of V and dO, multiples of 32,
//   that are multiplied, as HEAD_DIM where they are not defined; TILE_M queries, TILE_N keys of a tile,
//   STAGES; QUERY_GRADIENT 0|1 dQ is summed up too; those of score_options.cuh; DISTILL, 0 where it is
//   not defined: heads of V have a group of their own.
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

namespace cukit::backward {

using T = element_t;

constexpr int kConsumers = 2;
// The threads that fetch and add spill a little with 24 registers. With more, the consumers have fewer
// than 240 and the compiler has their products run one by one: 20 % slower.
using Block = WarpSpecialized<kConsumers, 24>;

// How tiles lie in shared memory, parts of 64 columns. Steps within tiles of as many rows are alike.
using KeyTile = SharedTile<T, TILE_N, COLUMNS>;
using ValueTile = SharedTile<T, TILE_N, VALUE_COLUMNS>;
using QueryTile = SharedTile<T, TILE_M, COLUMNS>;
using GradOutTile = SharedTile<T, TILE_M, VALUE_COLUMNS>;
// dQ is multiplied transposed: queries need not be a multiple of 64.
constexpr bool kTransposed = HEAD_DIM == 128;
// P or dS: a key a row or, transposed, a query.
using ScoreTile =
    SharedTile<T, kTransposed ? TILE_M : TILE_N, kTransposed ? TILE_N : TILE_M>;

#if QUERY_GRADIENT
constexpr int kAdders = 2;

// dQ on its way to global memory: what the adders wait for, and what waits for them.
struct Sums {
  StageBarriers<kAdders> staged;  // a tile lies in shared memory for an adder
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
  unsigned char* dq;        // what adders add to global memory
};

// Where a tensor map has a sequence: its first row, and the position on the outermost axis.
struct MapPlace {
  int row, outer;
};

// A work: keys of a head, and the tiles of queries that see them: of each query head in turn, from
// start_tile to end_tile - 1 and on from first_tile. The producer works it out for all others.
struct Work {
  MapPlace map_q, map_kv;
  int batch, key_head, first_key;
  int head;        // key_head, or one of those that share it
  int key_row;     // of first_key, in k
  int keys_left;   // to the end of the sequence
  int causal_offset;        // query i stands opposite key i + causal_offset
  int first_head;  // of q
#if DISTILL
  int value_head;
#endif
  int tiles;       // of queries, of a head, in the scratch
  int key_tiles;   // of a key head
  int first_scratch_tile;  // of the first head: tiles of all heads before it
  int first_tile, start_tile, end_tile, steps;
};

// A work, in the hands of one who does it.
struct ConsumerWork : Work {
  const ScoreArrays arrays;
  const ScoreSettings& settings;

  CUKIT_DEVICE ConsumerWork(const Work& work, const ScoreArrays& arrays, const ScoreSettings& settings)
      : Work(work), arrays(arrays), settings(settings) {}
};

constexpr int kWorkStages = 2;  // the one at hand, and the next

struct Shared {
  Pipeline<kWorkStages> work_pipeline;
  Pipeline<STAGES> q;         // with lse
  Pipeline<STAGES> grad_out;  // with delta
#if QUERY_GRADIENT
  Sums sums;
#endif
  StageBarriers<1> keys;       // K has come
  StageBarriers<1> values;     // V has
  StageBarriers<1> keys_read;  // both may be overwritten
  Work work[kWorkStages];          // no steps and no keys: there is none left
  alignas(16) float lse[STAGES][TILE_M];
  alignas(16) float delta[STAGES][TILE_M];
};

// One tile of queries after the other.
struct Position {
  int head = 0;
  int tile;

  CUKIT_DEVICE explicit Position(const Work& work) : tile(work.start_tile) {}

  // Of the scratch arrays: the tile, and its first row.
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

// Where a producer or consumer is, from one work to the next.
struct States {
  PipelineState<STAGES> queries;  // in the tiles of queries
  PipelineState<1> keys;     // in the works that have any queries
};

// One warp: starts the copies of a work's tiles. It stays together, so that what it counts lies in
// uniform registers; and no lane may miss a phase that the first one's copies bring to an end.
CUKIT_DEVICE void fetch(Shared& shared, const Tiles& tiles, const TensorMap* q, const TensorMap* k,
                        const TensorMap* v, const TensorMap* grad_out, const float* lse_log2,
                        const float* delta, const Work& work, States& states) {
  // A box wholly outside the tensor is never asked for: TMA then touches the address where the map
  // begins, which for maps of sequences (encode_sequence_map) need not be mapped memory.
  constexpr int kStatistics = TILE_M * 4;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  Position position(work);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    const PipelineState<STAGES>& state = states.queries;
    const int row = work.map_q.row + position.tile * TILE_M;
    const int head = work.first_head + position.head;
    const long long statistics = position.scratch_row(work);
    shared.q.acquire(state);
    __syncwarp();
    if (first_lane) {
      Mbarrier* const full = shared.q.expect(state, QueryTile::kBytes + kStatistics);
      QueryTile::load(tiles.q + state.index * QueryTile::kBytes, q, full, head, row, work.map_q.outer);
      bulk_load(shared.lse[state.index], lse_log2 + statistics, kStatistics, full);
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
      GradOutTile::load(tiles.grad_out + state.index * GradOutTile::kBytes, grad_out, full, head, row,
                        work.map_q.outer);
      bulk_load(shared.delta[state.index], delta + statistics, kStatistics, full);
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
