// The producer's side of flash_attention_sm90: tiles in shared memory and their pipelines, where keys
// and values come from, the thread that has them copied, and the warp that clears what lies behind a
// sequence.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/block_lists.cuh"
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

constexpr int kTileM = CONSUMERS * cukit::kWarpgroupRows;
using QueryTile = cukit::SharedTile<T, kTileM, HEAD_DIM>;
using KeyTile = cukit::SharedTile<T, TILE_N, HEAD_DIM>;
using ValueTile = cukit::SharedTile<T, TILE_N, VALUE_DIM>;

// Two consumers can do with fewer registers, for a producer that has more to keep in mind; with three
// or four it then keeps two or three words of a tile of queries in memory.
constexpr bool kBusyProducer = DEALT || WINDOW;
constexpr int kProducerRegisters =
    kBusyProducer && CONSUMERS == 2 ? 40 : VALUE_DIM > 128 ? 24 : 32;
using Block = cukit::WarpSpecialized<CONSUMERS, kProducerRegisters, BLOCKS_PER_SM>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(STAGES >= 2, "a warpgroup waits for the next values before it releases the last");

using cukit::QueryWork;
using QueryState = cukit::PipelineState<QUERY_STAGES>;
using KeyState = cukit::PipelineState<STAGES>;  // of K and of V

struct Pipelines {
  cukit::Pipeline<QUERY_STAGES> q;
  cukit::Pipeline<STAGES> k;
  cukit::Pipeline<STAGES> v;
#if DEALT
  QueryWork work[QUERY_STAGES];  // goes round with Q
#endif
#if VARLEN
  cukit::StageBarriers<STAGES> landed;  // V has come, but has not been cleared
  int rows[STAGES];                     // of V that belong to the sequence; below 0: no more
#endif
#if BLOCK_SPARSE
  int listed[STAGES];  // goes round with K: twice the tile's number, plus 1 where some key is hidden
#endif

  // One thread.
  CUKIT_DEVICE void init() {
    q.init(Block::kConsumerWarps);
    k.init(Block::kConsumerWarps);
    v.init(Block::kConsumerWarps);
#if VARLEN
    landed.init(1);
#endif
  }
};

// Dynamic shared memory: the stages of each.
struct Tiles {
  unsigned char* q;
  unsigned char* k;
  unsigned char* v;

  CUKIT_DEVICE explicit Tiles(unsigned char* shared)
      : q(shared), k(q + QUERY_STAGES * QueryTile::kBytes), v(k + STAGES * KeyTile::kBytes) {}
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
// compiled with the clearer.

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
    ValueTile::load(to, v, full, place.head, place.first_row + tile * TILE_N, place.batch);
  }
};

// ---- The thread that has tiles copied ----

template <typename KeyValues>
CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const cukit::TensorMap* q,
                      const KeyValues& key_values, const Arguments& arguments,
                      const cukit::ScoreSettings& settings) {
  QueryState q_at;
  KeyState k_at;
  KeyState v_at;
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
      pipelines.v.acquire(v_at);
      const int tile = tile_of(index);
#if VARLEN
      pipelines.rows[v_at.index] = min(TILE_N, work.sequence.seq_kv - tile * TILE_N);
      cukit::Mbarrier* const full = pipelines.landed.expect(v_at, ValueTile::kBytes);
#else
      cukit::Mbarrier* const full = pipelines.v.expect(v_at, ValueTile::kBytes);
#endif
      key_values.load_values(tiles.v + v_at.index * ValueTile::kBytes, full, place, tile);
      v_at.advance();
    };
    const int last = work.keys.end - 1;
    // Values follow a tile behind their keys. One loop in which each load stands once: the compiler
    // spills with a first and a last load outside.
#pragma unroll 1
    for (int tile = last; tile >= work.keys.begin - 1; --tile) {
      if (tile >= work.keys.begin) load_keys(tile);
      if (tile < last) {
        load_values(tile + 1);
      } else {
        pipelines.q.acquire(q_at);
#if DEALT
        pipelines.work[q_at.index] = work;
#endif
        QueryTile::load(tiles.q + q_at.index * QueryTile::kBytes, q,
                        pipelines.q.expect(q_at, QueryTile::kBytes), work.head,
                        work.sequence.first_q + work.first_row, VARLEN ? 0 : work.b);
        q_at.advance();
      }
    }
  }
#if DEALT
  pipelines.q.acquire(q_at);
  pipelines.work[q_at.index] = QueryWork{};
  pipelines.q.commit(q_at);
#endif
#if VARLEN
  pipelines.v.acquire(v_at);
  pipelines.rows[v_at.index] = -1;
  pipelines.landed.arrive(v_at);
#endif
}

}  // namespace producer

#if VARLEN
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

}  // namespace
