// The producer's side of flash_attention_sm90: where keys and values come from, the thread that has them
// copied, the warp that clears what lies outside a sequence, and those that prepare float8 values.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/block_lists.cuh"
#include "attention/forward_pages_sm90.cuh"
#include "attention/forward_pipelines_sm90.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/scores/score_options.cuh"

namespace {

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
  int group;        // heads of queries that share a key head
  int value_group;  // DISTILL: and a head of V

  struct Place {
    int head, first_row, batch;
#if DISTILL
    int value_head;
#endif
  };

  CUKIT_DEVICE Place place(const QueryWork& work) const {
#if DISTILL
    return {work.head / group, work.sequence.first_kv, VARLEN ? 0 : work.b,
            work.head / value_group};
#else
    return {work.head / group, work.sequence.first_kv, VARLEN ? 0 : work.b};
#endif
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    KeyTile::load(to, k, full, place.head, place.first_row + tile * TILE_N, place.batch);
  }

  CUKIT_DEVICE void load_values(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                int tile) const {
#if DISTILL
    const int head = place.value_head;
#else
    const int head = place.head;
#endif
    LoadedValues::load(to, v, full, head, place.first_row + tile * TILE_N, place.batch);
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
                      const cukit::ScoreSettings& settings,
                      const cukit::TensorMap* second_q = nullptr) {
  QueryState q_at;
  int first_part = 0;  // of the first consumer
  KeyState k_at;
#if PREPARES
  RawState v_at;
#else
  KeyState v_at;
#endif
  cukit::QueryTileScheduler<kTileM, TILE_N> queue(arguments.problem, arguments.plan, settings);
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
#if ROW_BY_ROW
      cukit::Mbarrier* const full = &pipelines.k.full.stage[k_at.index];
#else
      cukit::Mbarrier* const full = pipelines.k.expect(k_at, KeyTile::kBytes);
#endif
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
#if PAGED && WINDOW
      pipelines.hidden[v_at.index] = key_values.first_key(work) - tile * TILE_N;
#endif
#endif
#if PREPARES
      cukit::Mbarrier* const full = pipelines.raw.expect(v_at, RawTile::kBytes);
      unsigned char* const to = tiles.raw + v_at.index * RawTile::kBytes;
#else
#if CLEARED
      cukit::Mbarrier* const full = pipelines.landed.expect(v_at, ValueTile::kBytes);
#elif ROW_BY_ROW
      cukit::Mbarrier* const full = &pipelines.v.full.stage[v_at.index];
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
#if DYNAMIC_SCHEDULE
        pipelines.announce(q_at, work);
#endif
#pragma unroll (DYNAMIC_SCHEDULE ? CONSUMERS : 1)
        for (int group = 0; group < CONSUMERS; ++group) {
          cukit::Pipeline<QUERY_STAGES>& queries = pipelines.q[group];
          const int part = first_part == 0 ? group : first_part - group;
          if (!DYNAMIC_SCHEDULE) queries.acquire(q_at);
          const int at = q_at.index * CONSUMERS + group;
          const int row =
              work.sequence.first_q + work.first_row + part * cukit::kWarpgroupRows;
          const int batch = VARLEN ? 0 : work.b;
#if DISTILL
          constexpr int kBytes = QueryTile::kBytes + SecondQueryTile::kBytes;
          cukit::Mbarrier* const full = queries.expect(q_at, kBytes);
          SecondQueryTile::load(tiles.second_q + at * SecondQueryTile::kBytes, second_q, full,
                                work.head, row, batch);
#else
          cukit::Mbarrier* const full = queries.expect(q_at, QueryTile::kBytes);
#endif
          QueryTile::load(tiles.q + at * QueryTile::kBytes, q, full, work.head, row, batch);
        }
        first_part = part_of_next_tile(first_part);
        q_at.advance();
      }
#if PREPARES
      load_values(tile);
#endif
    }
  }
#if DYNAMIC_SCHEDULE
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
#if PAGED
  key_values.end();
#endif
}

}  // namespace producer

#if CLEARED
// One warp hands on the tiles of V, with zeros for the rows behind the end of the sequence and, of a cache,
// before the first key that is seen: what lies there may be another's, or NaN.
namespace clearer {

// Zeros for rows first .. end - 1 of a part.
CUKIT_DEVICE void clear_rows(unsigned char* part, int first, int end) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (int byte = first * ValueTile::kRowBytes + 16 * lane; byte < end * ValueTile::kRowBytes;
       byte += 16 * cukit::kWarpSize) {
    *reinterpret_cast<uint4*>(part + byte) = uint4{};
  }
}

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (KeyState at;; at.advance()) {
    pipelines.landed.wait(at);
    const int rows = pipelines.rows[at.index];
    if (rows < 0) return;
#if PAGED && WINDOW
    const int hidden = min(TILE_N, pipelines.hidden[at.index]);
#else
    constexpr int hidden = 0;
#endif
    if (rows < TILE_N || hidden > 0) {
      unsigned char* const tile = tiles.v + at.index * ValueTile::kBytes;
#pragma unroll 1
      for (int part = 0; part < ValueTile::kParts; ++part) {
        clear_rows(tile + part * ValueTile::kPartBytes, rows, TILE_N);
        if (hidden > 0) clear_rows(tile + part * ValueTile::kPartBytes, 0, hidden);
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
