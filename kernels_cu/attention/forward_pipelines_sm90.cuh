// The pipelines of flash_attention_sm90 and attention_kl_sm90, and their shared memory.
//
// DISTILL (attention_kl_sm90): V holds the keys of a second model, whose queries are loaded with Q.
// TEACHER: keys of a second model are loaded with K, its queries with Q.
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
#ifndef TEACHER
#define TEACHER 0
#endif

// PAGED: rows per TMA box, within one block of the cache; 0: blocks are copied row by row.
#ifndef PAGE_ROWS
#define PAGE_ROWS 0
#endif
#define ROW_BY_ROW (PAGED && !PAGE_ROWS)

// wgmma reads V as TMA loaded it, so rows outside the sequence must be overwritten with zeros.
#define ZERO_FILLED ((VARLEN || PAGED) && !FLOAT8 && !ROW_BY_ROW && !DISTILL)

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
#elif TEACHER
using SecondQueryTile = cukit::SharedTile<T, cukit::kWarpgroupRows, TEACHER_DIM>;
using TeacherKeyTile = cukit::SharedTile<T, TILE_N, TEACHER_DIM>;
#endif

// A producer with more state gets more registers if the consumers leave enough. With three or four
// 16-bit consumers it spills two or three words once per tile of queries.
constexpr bool kBusyProducer = DYNAMIC_SCHEDULE || WINDOW;
constexpr int kProducerRegisters =
    PREPARES || (TEACHER && kBusyProducer)          ? 56
    : DISTILL || TEACHER                            ? 40
    : kBusyProducer && (CONSUMERS == 2 || FLOAT8)   ? 40
    : VALUE_DIM > 128 || (FLOAT8 && CONSUMERS == 2) ? 24
                                                    : 32;
using Block = cukit::WarpSpecialized<CONSUMERS, kProducerRegisters, BLOCKS_PER_SM>;

static_assert(THREADS == Block::kThreads, "one producer warpgroup and CONSUMERS consumer warpgroups");
static_assert(STAGES >= 2, "a consumer waits for the next tile of V before it releases the current one");

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
// The last kFetchers warps of the producer warpgroup load tiles from the cache, round-robin.
constexpr int kFetchers = cukit::kWarpgroupWarps - 1 - ZERO_FILLED;
using RequestState = cukit::PipelineState<kFetchers>;

// A tile of K or V to load.
struct FetchRequest {
  KeyState stage;
  int b, head;         // of the queries
  int first_key, end;  // keys outside [first_key, end) are not read
  int tile;            // below 0: no further requests
  bool of_keys;
};
#endif

// The part (64 queries) of the next tile that a consumer owns. In the first tile, consumer i owns
// part i. Where a mask makes the parts' work unequal, the order alternates.
CUKIT_DEVICE int part_of_next_tile(int part) {
  return cukit::kUneven ? CONSUMERS - 1 - part : part;
}

struct Pipelines {
  cukit::Pipeline<QUERY_STAGES> q[CONSUMERS];  // no consumer waits for the Q of another
  cukit::Pipeline<STAGES> k;
  cukit::Pipeline<STAGES> v;
#if TEACHER
  cukit::Pipeline<STAGES> teacher;  // keys, a stage for each stage of K
#endif
#if DYNAMIC_SCHEDULE
  QueryWork work[QUERY_STAGES];  // of each stage of Q
#endif
#if ZERO_FILLED
  cukit::StageBarriers<STAGES> loaded;  // V is loaded, but not yet zero-filled
  int rows[STAGES];                     // of V, inside the sequence; below 0: no further tiles
#if PAGED && WINDOW
  int masked_rows[STAGES];  // rows before the first visible key
#endif
#endif
#if PAGED
  cukit::Pipeline<kFetchers> requests;
  FetchRequest request[kFetchers];
#endif
#if PREPARES
  cukit::Pipeline<kRawStages> raw;  // V before preparation
  int rows[kRawStages];             // of V, inside the sequence; below 0: no further tiles
#endif
#if BLOCK_SPARSE
  int listed[STAGES];  // of each stage of K: the tile's entry in BlockLists::lists
#endif

  // Called by one thread.
  CUKIT_DEVICE void init() {
    for (cukit::Pipeline<QUERY_STAGES>& queries : q) queries.init(cukit::kWarpgroupWarps);
    k.init(Block::kConsumerWarps);
    v.init(Block::kConsumerWarps, PREPARES ? kPreparers : 1);
#if TEACHER
    teacher.init(Block::kConsumerWarps);
#endif
#if ZERO_FILLED
    loaded.init(1);
#endif
#if PAGED
    requests.init(1);
#endif
#if PREPARES
    raw.init(kPreparers);
#endif
  }

#if DYNAMIC_SCHEDULE
  // Writes the work of a stage of Q, once all consumers have released the previous one.
  CUKIT_DEVICE void announce(const QueryState& state, const QueryWork& next) {
    for (cukit::Pipeline<QUERY_STAGES>& queries : q) queries.acquire(state);
    work[state.index] = next;
  }
#endif
};

// Dynamic shared memory: the stages of each pipeline, and the consumers' partial outputs.
struct Tiles {
  unsigned char* q;
  unsigned char* k;
  unsigned char* raw;
  unsigned char* v;
  unsigned char* partial_outputs;
#if DISTILL || TEACHER
  unsigned char* second_q;
#endif
#if TEACHER
  unsigned char* teacher;
#endif

  CUKIT_DEVICE explicit Tiles(unsigned char* shared)
      : q(shared),
        k(q + QUERY_STAGES * CONSUMERS * QueryTile::kBytes),
        raw(k + STAGES * KeyTile::kBytes),
        v(raw),
        partial_outputs(nullptr) {
#if PREPARES
    v += kRawStages * RawTile::kBytes;
#endif
    partial_outputs = v + STAGES * ValueTile::kBytes;
#if DISTILL || TEACHER
    second_q = partial_outputs;
#endif
#if TEACHER
    teacher = second_q + QUERY_STAGES * CONSUMERS * SecondQueryTile::kBytes;
#endif
  }
};

// The arguments of a launch.
struct Arguments {
  cukit::WorkProblem problem;
  cukit::WorkPlan plan;
  cukit::ScoreArrays arrays;
  cukit::BlockLists blocks;
  int gqa_group;  // query heads that share a key head
};

}  // namespace
