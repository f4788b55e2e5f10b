// The producer's side of flash_attention_sm90: tiles in shared memory and their pipelines, where keys
// and values come from, the thread that has them copied, the warp that clears what lies behind a
// sequence, and the warps that prepare float8 values.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/block_lists.cuh"
#include "attention/forward_operands.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

// V is in shared memory as TMA brings it, and zeros are to replace what lies behind a sequence.
#define CLEARED (VARLEN && !FLOAT8)

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

// Two consumers can do with fewer registers, for a producer that has more to keep in mind; with three
// or four it then keeps two or three words of a tile of queries in memory.
constexpr bool kBusyProducer = DEALT || WINDOW;
constexpr int kProducerRegisters =
    PREPARES                                        ? 56
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

// Which 64 of a tile's queries a consumer takes: its own index of the first tile; where a mask gives
// the parts unlike work, they are counted from the other end in every second one.
CUKIT_DEVICE int part_of_next_tile(int part) {
  return cukit::kUneven ? CONSUMERS - 1 - part : part;
}

struct Pipelines {
  cukit::Pipeline<QUERY_STAGES> q[CONSUMERS];  // of each its own: none waits for another's queries
  cukit::Pipeline<STAGES> k;
  cukit::Pipeline<STAGES> v;
#if DEALT
  QueryWork work[QUERY_STAGES];  // goes round with Q
#endif
#if CLEARED
  cukit::StageBarriers<STAGES> landed;  // V has come, but has not been cleared
  int rows[STAGES];                     // of V that belong to the sequence; below 0: no more
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
#if PREPARES
    raw.init(kPreparers);
#endif
  }

#if DEALT
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

namespace producer {

// ---- Key-value sources ----
//
// A source says where the tiles of K and V of a sequence come from. It has
//   Place                             what it knows of a sequence and a key head
//   place(work)                       worked out once for each tile of queries
//   load_keys(to, full, place, tile)  one thread: starts the copies of keys tile * TILE_N .. of the
//   load_values(...)                  sequence to a KeyTile (ValueTile); they report the tile's whole
//                                     kBytes to `full`
// Rows behind the sequence's end may hold anything in K. In V they hold zeros, or the kernel is
// compiled with the clearer or the preparers.

#if FLOAT8
using LoadedValues = ValueTile::Raw;
#else
using LoadedValues = ValueTile;
#endif

// One tensor map for all sequences, [batch, seq_kv, heads_kv, columns]. VARLEN: sequences follow each
// other in a single batch.
struct MappedKeyValues {
  const cukit::TensorMap* k;
  const cukit::TensorMap* v;
  int group;  // heads of queries that share a key head

  struct Place {
    int head, first_row, batch;
  };

  CUKIT_DEVICE Place place(const QueryWork& work) const {
    return {work.head / group, work.sequence.first_kv, VARLEN ? 0 : work.b};
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    KeyTile::load(to, k, full, place.head, place.first_row + tile * TILE_N, place.batch);
  }

  CUKIT_DEVICE void load_values(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                int tile) const {
    LoadedValues::load(to, v, full, place.head, place.first_row + tile * TILE_N, place.batch);
  }
};

#if FLOAT8 && !PREPARES
// Keys as above; values that a kernel before has prepared (float8_values.cuh).
struct PreparedKeyValues {
  MappedKeyValues mapped;
  const unsigned char* values;
  int tiles;  // of a key head

  struct Place {
    MappedKeyValues::Place mapped;
    const unsigned char* values;
  };

  CUKIT_DEVICE Place place(const QueryWork& work) const {
    const cukit::Sequence& sequence = work.sequence;
    const int first = cukit::first_value_tile<TILE_N>(VARLEN, work.b, sequence.first_kv,
                                                      (sequence.seq_kv + TILE_N - 1) / TILE_N);
    const MappedKeyValues::Place place = mapped.place(work);
    const long long tile = static_cast<long long>(place.head) * tiles + first;
    return {place, values + tile * ValueTile::kBytes};
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    mapped.load_keys(to, full, place.mapped, tile);
  }

  CUKIT_DEVICE void load_values(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                int tile) const {
    cukit::bulk_load(to, place.values + static_cast<long long>(tile) * ValueTile::kBytes,
                     ValueTile::kBytes, full);
  }
};
#endif

// ---- The thread that has tiles copied ----

template <typename KeyValues>
CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const cukit::TensorMap* q,
                      const KeyValues& key_values, const Arguments& arguments,
                      const cukit::ScoreSettings& settings) {
  QueryState q_at;
  int first_part = 0;  // of the first consumer
  KeyState k_at;
#if PREPARES
  RawState v_at;
#else
  KeyState v_at;
#endif
  cukit::WorkQueue<kTileM, TILE_N> queue(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  while (queue.next(work)) {
    const typename KeyValues::Place place = key_values.place(work);
#if BLOCK_SPARSE
    const int* list = arguments.blocks.list<kTileM, TILE_N>(work.head, work.first_row / kTileM);
    work.keys = {0, *list, 0, 0};
#endif
    const auto tile_of = [&](int index) {
#if BLOCK_SPARSE
      return list[1 + index] / 2;
#else
      return index;
#endif
    };
    const auto load_keys = [&](int index) {
      pipelines.k.acquire(k_at);
#if BLOCK_SPARSE
      pipelines.listed[k_at.index] = list[1 + index];
#endif
      const int tile = tile_of(index);
      cukit::Mbarrier* const full = pipelines.k.expect(k_at, KeyTile::kBytes);
      key_values.load_keys(tiles.k + k_at.index * KeyTile::kBytes, full, place, tile);
      k_at.advance();
    };
    const auto load_values = [&](int index) {
#if PREPARES
      pipelines.raw.acquire(v_at);
#else
      pipelines.v.acquire(v_at);
#endif
      const int tile = tile_of(index);
#if PREPARES || CLEARED
      pipelines.rows[v_at.index] = min(TILE_N, work.sequence.seq_kv - tile * TILE_N);
#endif
#if PREPARES
      cukit::Mbarrier* const full = pipelines.raw.expect(v_at, RawTile::kBytes);
      unsigned char* const to = tiles.raw + v_at.index * RawTile::kBytes;
#else
#if CLEARED
      cukit::Mbarrier* const full = pipelines.landed.expect(v_at, ValueTile::kBytes);
#else
      cukit::Mbarrier* const full = pipelines.v.expect(v_at, ValueTile::kBytes);
#endif
      unsigned char* const to = tiles.v + v_at.index * ValueTile::kBytes;
#endif
      key_values.load_values(to, full, place, tile);
      v_at.advance();
    };
    const int last = work.keys.end - 1;
    // Values follow a tile behind their keys, or come with them where they have yet to be prepared. One
    // loop in which each load stands once: the compiler spills with a first and a last load outside.
#pragma unroll 1
    for (int tile = last; tile >= work.keys.begin - !PREPARES; --tile) {
      if (tile >= work.keys.begin) load_keys(tile);
      if (tile < last) {
#if !PREPARES
        load_values(tile + 1);
#endif
      } else {
#if DEALT
        pipelines.announce(q_at, work);
#endif
#pragma unroll (DEALT ? CONSUMERS : 1)
        for (int group = 0; group < CONSUMERS; ++group) {
          cukit::Pipeline<QUERY_STAGES>& queries = pipelines.q[group];
          const int part = first_part == 0 ? group : first_part - group;
          if (!DEALT) queries.acquire(q_at);
          QueryTile::load(tiles.q + (q_at.index * CONSUMERS + group) * QueryTile::kBytes, q,
                          queries.expect(q_at, QueryTile::kBytes), work.head,
                          work.sequence.first_q + work.first_row + part * cukit::kWarpgroupRows,
                          VARLEN ? 0 : work.b);
        }
        first_part = part_of_next_tile(first_part);
        q_at.advance();
      }
#if PREPARES
      load_values(tile);
#endif
    }
  }
#if DEALT
  pipelines.announce(q_at, QueryWork{});
  for (cukit::Pipeline<QUERY_STAGES>& queries : pipelines.q) queries.commit(q_at);
#endif
#if PREPARES
  pipelines.raw.acquire(v_at);
  pipelines.rows[v_at.index] = -1;
  pipelines.raw.commit(v_at);
#elif CLEARED
  pipelines.v.acquire(v_at);
  pipelines.rows[v_at.index] = -1;
  pipelines.landed.arrive(v_at);
#endif
}

}  // namespace producer

#if CLEARED
// One warp hands on the tiles of V, with zeros for the rows behind the end of the sequence.
namespace clearer {

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (KeyState at;; at.advance()) {
    pipelines.landed.wait(at);
    const int rows = pipelines.rows[at.index];
    if (rows < 0) return;
    if (rows < TILE_N) {
      unsigned char* const tile = tiles.v + at.index * ValueTile::kBytes;
#pragma unroll 1
      for (int part = 0; part < ValueTile::kParts; ++part) {
        for (int byte = rows * ValueTile::kRowBytes + 16 * lane; byte < ValueTile::kPartBytes;
             byte += 16 * cukit::kWarpSize) {
          *reinterpret_cast<uint4*>(tile + part * ValueTile::kPartBytes + byte) = uint4{};
        }
      }
      cukit::fence_proxy_async();
    }
    __syncwarp();
    if (lane == 0) pipelines.v.commit(at);
  }
}

}  // namespace clearer
#endif

#if PREPARES
// The other warps of the producer's warpgroup make operands of the tiles of V.
namespace preparer {

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles) {
  const int warp = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize) - 1;
  RawState raw_at;
  for (KeyState at;; at.advance(), raw_at.advance()) {
    pipelines.raw.wait(raw_at);
    const int rows = pipelines.rows[raw_at.index];
    if (rows < 0) return;
    pipelines.v.acquire(at);
    ValueTile::prepare(tiles.raw + raw_at.index * RawTile::kBytes,
                       tiles.v + at.index * ValueTile::kBytes, rows, warp, kPreparers);
    cukit::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % cukit::kWarpSize == 0) pipelines.v.commit(at);
    pipelines.raw.release(raw_at);
  }
}

}  // namespace preparer
#endif

}  // namespace
