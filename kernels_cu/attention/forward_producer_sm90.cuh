// The producer warpgroup of flash_attention_sm90 and attention_kl_sm90: sources of keys and values,
// the thread that issues their loads, the warp that zeroes rows of V outside the sequence, and the
// warps that prepare FP8 values.
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
// A source loads the tiles of K and V of a sequence. (With PAGED, forward_pages_sm90.cuh requests
// the tiles from other warps instead.) The interface of a source:
//   Place                             the location of a sequence and key head
//   place(work)                       computed once for each tile of queries
//   load_keys(to, full, place, tile)  one thread: issues the loads of a tile of keys to a KeyTile
//                                     (`to`), which complete on the mbarrier `full`
//   load_teacher(...)                 TEACHER: the same for the teacher's keys
//   load_values(...)                  the same for values, to a ValueTile or, with PREPARES, to a
//                                     RawTile
// Beyond the end of the sequence, rows of K may hold arbitrary data, and so may rows of V if the
// kernel has DISTILL, a zero filler (ZERO_FILLED) or preparers (PREPARES). Otherwise these rows of
// V must be zeros.

#if FLOAT8
using LoadedValues = ValueTile::Raw;
#else
using LoadedValues = ValueTile;
#endif

// One tensor map for all sequences, [batch, seq_kv, heads_kv, columns]. VARLEN: the sequences are
// concatenated in a single batch.
struct MappedKeyValues {
  const cukit::TensorMap* k;
  const cukit::TensorMap* v;
  int gqa_group;    // query heads that share a key head
  int value_group;  // DISTILL: query heads that share a head of V
#if TEACHER
  const cukit::TensorMap* teacher;  // keys
  int teacher_group;                // query heads that share a teacher's key head
#endif

  struct Place {
    int head, first_row, batch;
#if DISTILL
    int value_head;
#elif TEACHER
    int teacher_head;
#endif
  };

  CUKIT_DEVICE Place place(const QueryWork& work) const {
#if DISTILL
    return {work.head / gqa_group, work.sequence.first_kv, VARLEN ? 0 : work.b,
            work.head / value_group};
#elif TEACHER
    return {work.head / gqa_group, work.sequence.first_kv, VARLEN ? 0 : work.b,
            work.head / teacher_group};
#else
    return {work.head / gqa_group, work.sequence.first_kv, VARLEN ? 0 : work.b};
#endif
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    KeyTile::load(to, k, full, place.head, place.first_row + tile * TILE_N, place.batch);
  }

#if TEACHER
  CUKIT_DEVICE void load_teacher(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                 int tile) const {
    TeacherKeyTile::load(to, teacher, full, place.teacher_head, place.first_row + tile * TILE_N,
                         place.batch);
  }
#endif

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
// Keys as in MappedKeyValues; values prepared by flash_attention_fp8_values (float8_values.cuh).
struct PreparedKeyValues {
  MappedKeyValues mapped;
  const unsigned char* values;
  int tiles;  // of values per key head

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

// ---- The thread that issues the loads ----

template <typename KeyValues>
CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const cukit::TensorMap* q,
                      const KeyValues& key_values, const Arguments& arguments,
                      const cukit::ScoreSettings& settings,
                      const cukit::TensorMap* second_q = nullptr) {
  QueryState q_state;
  int first_part = 0;  // part of the query tile that consumer 0 owns
  KeyState k_state;
#if PREPARES
  RawState v_state;
#else
  KeyState v_state;
#endif
  cukit::QueryTileScheduler<kTileM, TILE_N> scheduler(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  while (scheduler.next(work)) {
#if !PAGED
    const typename KeyValues::Place place = key_values.place(work);
#endif
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
#if PAGED
      key_values.request(k_state, work, index, true);
#else
#if TEACHER
      pipelines.teacher.acquire(k_state);
      key_values.load_teacher(tiles.teacher + k_state.index * TeacherKeyTile::kBytes,
                              pipelines.teacher.expect(k_state, TeacherKeyTile::kBytes), place,
                              index);
#endif
      pipelines.k.acquire(k_state);
#if BLOCK_SPARSE
      pipelines.listed[k_state.index] = list[1 + index];
#endif
      const int tile = tile_of(index);
      cukit::Mbarrier* const full = pipelines.k.expect(k_state, KeyTile::kBytes);
      key_values.load_keys(tiles.k + k_state.index * KeyTile::kBytes, full, place, tile);
#endif
      k_state.advance();
    };
    const auto load_values = [&](int index) {
#if PAGED
      key_values.request(v_state, work, index, false);
#else
#if PREPARES
      pipelines.raw.acquire(v_state);
#else
      pipelines.v.acquire(v_state);
#endif
      const int tile = tile_of(index);
#if PREPARES || ZERO_FILLED
      pipelines.rows[v_state.index] = min(TILE_N, work.sequence.seq_kv - tile * TILE_N);
#endif
#if PREPARES
      cukit::Mbarrier* const full = pipelines.raw.expect(v_state, RawTile::kBytes);
      unsigned char* const to = tiles.raw + v_state.index * RawTile::kBytes;
#else
#if ZERO_FILLED
      cukit::Mbarrier* const full = pipelines.loaded.expect(v_state, ValueTile::kBytes);
#else
      cukit::Mbarrier* const full = pipelines.v.expect(v_state, ValueTile::kBytes);
#endif
      unsigned char* const to = tiles.v + v_state.index * ValueTile::kBytes;
#endif
      key_values.load_values(to, full, place, tile);
#endif
      v_state.advance();
    };
    const int last = work.keys.end - 1;
    // V is loaded one tile behind K or, with PREPARES, together with K. The loop contains each load
    // once: with the first and last iterations peeled, the compiler spills.
#pragma unroll 1
    for (int tile = last; tile >= work.keys.begin - !PREPARES; --tile) {
      if (tile >= work.keys.begin) load_keys(tile);
      if (tile < last) {
#if !PREPARES
        load_values(tile + 1);
#endif
      } else {
#if DYNAMIC_SCHEDULE
        pipelines.announce(q_state, work);
#endif
#pragma unroll (DYNAMIC_SCHEDULE ? CONSUMERS : 1)
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
          cukit::Pipeline<QUERY_STAGES>& queries = pipelines.q[consumer];
          const int part = first_part == 0 ? consumer : first_part - consumer;
          if (!DYNAMIC_SCHEDULE) queries.acquire(q_state);
          const int slot = q_state.index * CONSUMERS + consumer;
          const int row =
              work.sequence.first_q + work.first_row + part * cukit::kWarpgroupRows;
          const int batch = VARLEN ? 0 : work.b;
#if DISTILL || TEACHER
          constexpr int kBytes = QueryTile::kBytes + SecondQueryTile::kBytes;
          cukit::Mbarrier* const full = queries.expect(q_state, kBytes);
          SecondQueryTile::load(tiles.second_q + slot * SecondQueryTile::kBytes, second_q, full,
                                work.head, row, batch);
#else
          cukit::Mbarrier* const full = queries.expect(q_state, QueryTile::kBytes);
#endif
          QueryTile::load(tiles.q + slot * QueryTile::kBytes, q, full, work.head, row, batch);
        }
        first_part = part_of_next_tile(first_part);
        q_state.advance();
      }
#if PREPARES
      load_values(tile);
#endif
    }
  }
#if DYNAMIC_SCHEDULE
  pipelines.announce(q_state, QueryWork{});
  for (cukit::Pipeline<QUERY_STAGES>& queries : pipelines.q) queries.commit(q_state);
#endif
#if PAGED
  key_values.end();  // before acquire() below: the fetchers may still have to fill that stage of V
#endif
#if PREPARES
  pipelines.raw.acquire(v_state);
  pipelines.rows[v_state.index] = -1;
  pipelines.raw.commit(v_state);
#elif ZERO_FILLED
  pipelines.v.acquire(v_state);
  pipelines.rows[v_state.index] = -1;
  pipelines.loaded.arrive(v_state);
#endif
}

}  // namespace producer

#if ZERO_FILLED
// One warp passes tiles of V on to the consumers, after zeroing the rows beyond the end of the
// sequence and, of a paged cache, before the first visible key: these may belong to another
// sequence, or be NaN.
namespace zero_filler {

// Zeroes rows first .. end - 1 of a part of a tile.
CUKIT_DEVICE void zero_rows(unsigned char* part, int first, int end) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (int byte = first * ValueTile::kRowBytes + 16 * lane; byte < end * ValueTile::kRowBytes;
       byte += 16 * cukit::kWarpSize) {
    *reinterpret_cast<uint4*>(part + byte) = uint4{};
  }
}

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (KeyState state;; state.advance()) {
    pipelines.loaded.wait(state);
    const int rows = pipelines.rows[state.index];
    if (rows < 0) return;
#if PAGED && WINDOW
    const int masked = min(TILE_N, pipelines.masked_rows[state.index]);
#else
    constexpr int masked = 0;
#endif
    if (rows < TILE_N || masked > 0) {
      unsigned char* const tile = tiles.v + state.index * ValueTile::kBytes;
#pragma unroll 1
      for (int part = 0; part < ValueTile::kParts; ++part) {
        zero_rows(tile + part * ValueTile::kPartBytes, rows, TILE_N);
        if (masked > 0) zero_rows(tile + part * ValueTile::kPartBytes, 0, masked);
      }
      cukit::fence_proxy_async();
    }
    __syncwarp();
    if (lane == 0) pipelines.v.commit(state);
  }
}

}  // namespace zero_filler
#endif

#if PREPARES
// The other warps of the producer warpgroup turn tiles of V into wgmma operands.
namespace preparer {

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles) {
  const int warp = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize) - 1;
  RawState raw_state;
  for (KeyState state;; state.advance(), raw_state.advance()) {
    pipelines.raw.wait(raw_state);
    const int rows = pipelines.rows[raw_state.index];
    if (rows < 0) return;
    pipelines.v.acquire(state);
    ValueTile::prepare(tiles.raw + raw_state.index * RawTile::kBytes,
                       tiles.v + state.index * ValueTile::kBytes, rows, warp, kPreparers);
    cukit::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % cukit::kWarpSize == 0) pipelines.v.commit(state);
    pipelines.raw.release(raw_state);
  }
}

}  // namespace preparer
#endif

}  // namespace
