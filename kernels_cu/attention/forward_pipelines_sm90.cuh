// The stages of shared memory through which the warps of flash_attention_sm90 hand on tiles.
//
// DISTILL, of attention_kl_sm90: V is another model's keys, over which no product sums, and comes with
// queries of its own.
//
// Macros: those of flash_attention_sm90.cu; DISTILL, 0 where it is not defined.
#pragma once

#include "attention/block_lists.cuh"
#include "attention/forward_operands.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

#ifndef DISTILL
#define DISTILL 0
#endif

// PAGED: rows of a box of a block; 0: blocks are copied row by row.
#ifndef PAGE_ROWS
#define PAGE_ROWS 0
#endif
#define ROW_BY_ROW (PAGED && !PAGE_ROWS)

// V is in shared memory as TMA brings it, and zeros are to replace what lies outside a sequence.
#define CLEARED ((VARLEN || PAGED) && !FLOAT8 && !ROW_BY_ROW && !DISTILL)

constexpr int kTileM = CONSUMERS * cukit::kWarpgroupRows;
#if !FLOAT8
using Operands = cukit::SixteenBitOperands<T, TILE_N, HEAD_DIM, VALUE_DIM>;
#elif PRECISE
using Operands = cukit::PreciseFloat8Operands<TILE_N, HEAD_DIM, VALUE_DIM>;
#else
using Operands = cukit::Float8Operands<TILE_N, HEAD_DIM, VALUE_DIM>;
#endif
using QueryTile = Operands::QueryTile;
using KeyTile = Operands::KeyTile;
using ValueTile = Operands::ValueTile;
#if DISTILL
using SecondQueryTile = cukit::SharedTile<T, cukit::kWarpgroupRows, VALUE_DIM>;
#endif

// Two consumers can do with fewer registers, for a producer that has more to keep in mind; with three
// or four it then keeps two or three words of a tile of queries in memory.
constexpr bool kBusyProducer = DYNAMIC_SCHEDULE || WINDOW;
constexpr int kProducerRegisters =
    PREPARES                                        ? 56
    : DISTILL                                       ? 40
    : kBusyProducer && (CONSUMERS == 2 || FLOAT8)   ? 40
    : VALUE_DIM > 128 || (FLOAT8 && CONSUMERS == 2) ? 24
                                                    : 32;
using Block = cukit::WarpSpecialized<CONSUMERS, kProducerRegisters, BLOCKS_PER_SM>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(STAGES >= 2, "a warpgroup waits for the next values before it releases the last");

using cukit::QueryWork;
using QueryState = cukit::PipelineState<QUERY_STAGES>;
using KeyState = cukit::PipelineState<STAGES>;  // of K and of V
#if PREPARES
constexpr int kRawStages = 2;
constexpr int kPreparers = cukit::kWarpgroupWarps - 1;  // warps
using RawTile = ValueTile::Raw;
using RawState = cukit::PipelineState<kRawStages>;
#else
constexpr int kPreparers = 0;
#endif

#if PAGED
// The last warps of the producer's warpgroup, which fetch tiles from a cache, each in turn.
constexpr int kFetchers = cukit::kWarpgroupWarps - 1 - CLEARED;
using OrderState = cukit::PipelineState<kFetchers>;

// A tile of K or V to be fetched.
struct Order {
  unsigned char* to;      // null: there is no more
  cukit::Mbarrier* full;  // where to report
  int b, head;            // of the queries
  int first_key, end;     // keys that the tile of queries may see: no other is read
  int tile;
  bool of_keys;
};
#endif

// Which 64 of a tile's queries a consumer takes: its own index of the first tile; where a mask gives
// the parts unlike work, they are counted from the other end in every second one.
CUKIT_DEVICE int part_of_next_tile(int part) {
  return cukit::kUneven ? CONSUMERS - 1 - part : part;
}

struct Pipelines {
  cukit::Pipeline<QUERY_STAGES> q[CONSUMERS];  // of each its own: none waits for another's queries
  cukit::Pipeline<STAGES> k;
  cukit::Pipeline<STAGES> v;
#if DYNAMIC_SCHEDULE
  QueryWork work[QUERY_STAGES];  // goes round with Q
#endif
#if CLEARED
  cukit::StageBarriers<STAGES> landed;  // V has come, but has not been cleared
  int rows[STAGES];                     // of V that belong to the sequence; below 0: no more
#if PAGED && WINDOW
  int hidden[STAGES];  // rows before the first that a query sees
#endif
#endif
#if PAGED
  cukit::Pipeline<kFetchers> orders;
  Order order[kFetchers];
#endif
#if PREPARES
  cukit::Pipeline<kRawStages> raw;  // V as it comes
  int rows[kRawStages];             // as above
#endif
#if BLOCK_SPARSE
  int listed[STAGES];  // goes round with K: twice the tile's number, plus 1 where some key is hidden
#endif

  // One thread.
  CUKIT_DEVICE void init() {
    for (cukit::Pipeline<QUERY_STAGES>& queries : q) queries.init(cukit::kWarpgroupWarps);
    k.init(Block::kConsumerWarps);
    v.init(Block::kConsumerWarps, PREPARES ? kPreparers : 1);
#if CLEARED
    landed.init(1);
#endif
#if PAGED
    orders.init(1);
#endif
#if PREPARES
    raw.init(kPreparers);
#endif
  }

#if DYNAMIC_SCHEDULE
  // Says what the stage's queries are, once all consumers have released those before.
  CUKIT_DEVICE void announce(const QueryState& at, const QueryWork& next) {
    for (cukit::Pipeline<QUERY_STAGES>& queries : q) queries.acquire(at);
    work[at.index] = next;
  }
#endif
};

// Dynamic shared memory: the stages of each, and what consumers keep outside their registers.
struct Tiles {
  unsigned char* q;
  unsigned char* k;
  unsigned char* raw;
  unsigned char* v;
  unsigned char* kept;
#if DISTILL
  unsigned char* second_q;
#endif

  CUKIT_DEVICE explicit Tiles(unsigned char* shared)
      : q(shared),
        k(q + QUERY_STAGES * CONSUMERS * QueryTile::kBytes),
        raw(k + STAGES * KeyTile::kBytes),
        v(raw),
        kept(nullptr) {
#if PREPARES
    v += kRawStages * RawTile::kBytes;
#endif
    kept = v + STAGES * ValueTile::kBytes;
#if DISTILL
    second_q = kept;
#endif
  }
};

// What a launch works on, as it is passed.
struct Arguments {
  cukit::WorkProblem problem;
  cukit::WorkPlan plan;
  cukit::ScoreArrays arrays;
  cukit::BlockLists blocks;
  int group;
};

}  // namespace
