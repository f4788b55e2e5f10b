// The side of flash_attention_sm90 that decides what is worked on and has it copied: tiles in shared
// memory, their rings, the producer, and the warp that clears what lies behind a sequence.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/block_lists.cuh"
#include "attention/query_work.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ring.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
constexpr int kTileM = CONSUMERS * kGroupRows;
constexpr int kParts = (HEAD_DIM + 63) / 64;
constexpr int kValueParts = (VALUE_DIM + 63) / 64;
constexpr int kRowBytes = 128;  // of a part
constexpr int kQueryPart = kTileM * kRowBytes;
constexpr int kKeyPart = TILE_N * kRowBytes;
constexpr int kQueryBytes = kParts * kQueryPart;
constexpr int kKeyBytes = kParts * kKeyPart;
constexpr int kValueBytes = kValueParts * kKeyPart;
constexpr int kConsumerWarps = CONSUMERS * kGroupThreads / cukit::kWarpSize;
// Registers of a thread: at the start alike for all, then as many as the producer leaves.
constexpr int kStartRegisters = 65536 / (THREADS * BLOCKS_PER_SM) / 8 * 8;
// Two consumers can do with less, for a producer that has more to keep in mind; with three or four
// it then keeps two or three words of a tile of queries in memory.
constexpr bool kBusyProducer = DEALT || WINDOW;
constexpr int kProducerRegisters =
    kBusyProducer && CONSUMERS == 2 ? 40 : VALUE_DIM > 128 ? 24 : 32;
constexpr int kConsumerRegisters =
    (kStartRegisters * (CONSUMERS + 1) - kProducerRegisters) / CONSUMERS / 8 * 8;
// Chunks of 32 columns reach beyond the last one of the output.
constexpr bool kGuarded = VALUE_PADDED || VALUE_DIM % 32 != 0;
constexpr float kLn2 = 0.6931471805599453f;

static_assert(THREADS == (CONSUMERS + 1) * kGroupThreads, "a producer and the consumers");
static_assert(STAGES >= 2, "a warpgroup waits for the next values before it releases the last");
static_assert(kQueryPart % 1024 == 0 && kKeyPart % 1024 == 0, "whole periods of the swizzle");

using cukit::QueryWork;

struct Rings {
  cukit::Ring<QUERY_STAGES> q;
  cukit::Ring<STAGES> k;
  cukit::Ring<STAGES> v;
#if DEALT
  QueryWork work[QUERY_STAGES];  // goes round with Q
#endif
#if VARLEN
  cukit::Mbarrier landed[STAGES];  // V has come, but not yet been cleared
  int rows[STAGES];                // of V that belong to the sequence; below 0: no more
#endif
#if BLOCK_SPARSE
  int listed[STAGES];  // goes round with K: twice the tile's number, plus 1 where some key is hidden
#endif
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

// A stage, once its readers are through with it.
template <int Stages>
CUKIT_DEVICE void wait_empty(cukit::Ring<Stages>& ring, const cukit::Cursor<Stages>& at) {
  cukit::mbarrier_wait(&ring.empty[at.stage], at.parity ^ 1);
}

// Asks for a tile, which is to report to `landed`.
template <int Parts, int Stages>
CUKIT_DEVICE void load(cukit::Mbarrier* landed, cukit::Cursor<Stages>& at, unsigned char* tiles,
                       int part_bytes, const cukit::TensorMap* map, int row, int head, int b) {
  cukit::Mbarrier* full = &landed[at.stage];
  cukit::mbarrier_arrive_expect(full, Parts * part_bytes);
  unsigned char* tile = tiles + at.stage * Parts * part_bytes;
#pragma unroll 1
  for (int part = 0; part < Parts; ++part) {
    cukit::tma_load_4d(tile + part * part_bytes, map, full, part * 64, head, row, b);
  }
  at.advance();
}

struct Maps {
  const cukit::TensorMap* q;
  const cukit::TensorMap* k;
  const cukit::TensorMap* v;
};

CUKIT_DEVICE void run(Rings& rings, unsigned char* q_tiles, unsigned char* k_tiles,
                      unsigned char* v_tiles, const Maps& maps, const Arguments& arguments,
                      const cukit::ScoreSettings& settings) {
  cukit::Cursor<QUERY_STAGES> q_at;
  cukit::Cursor<STAGES> k_at;
  cukit::Cursor<STAGES> v_at;
  cukit::WorkQueue<kTileM, TILE_N> queue(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  while (queue.next(work)) {
    const int b = VARLEN ? 0 : work.b;  // of the maps
    const int head = work.head / arguments.group;
    const int first_kv = work.sequence.first_kv;
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
      wait_empty(rings.k, k_at);
#if BLOCK_SPARSE
      rings.listed[k_at.stage] = list[1 + index];
#endif
      const int tile = tile_of(index);
      load<kParts>(rings.k.full, k_at, k_tiles, kKeyPart, maps.k, first_kv + tile * TILE_N,
                   head, b);
    };
    const auto load_values = [&](int index) {
      wait_empty(rings.v, v_at);
      const int tile = tile_of(index);
#if VARLEN
      rings.rows[v_at.stage] = min(TILE_N, work.sequence.seq_kv - tile * TILE_N);
      cukit::Mbarrier* const full = rings.landed;
#else
      cukit::Mbarrier* const full = rings.v.full;
#endif
      load<kValueParts>(full, v_at, v_tiles, kKeyPart, maps.v, first_kv + tile * TILE_N,
                        head, b);
    };
    const int last = work.keys.end - 1;
    // Values follow a tile behind their keys.
#pragma unroll 1
    for (int tile = last; tile >= work.keys.begin - 1; --tile) {
      if (tile >= work.keys.begin) load_keys(tile);
      if (tile < last) {
        load_values(tile + 1);
      } else {
        wait_empty(rings.q, q_at);
#if DEALT
        rings.work[q_at.stage] = work;
#endif
        load<kParts>(rings.q.full, q_at, q_tiles, kQueryPart, maps.q,
                     work.sequence.first_q + work.first_row, work.head, b);
      }
    }
  }
#if DEALT
  wait_empty(rings.q, q_at);
  rings.work[q_at.stage] = QueryWork{};
  cukit::mbarrier_arrive(&rings.q.full[q_at.stage]);
#endif
#if VARLEN
  wait_empty(rings.v, v_at);
  rings.rows[v_at.stage] = -1;
  cukit::mbarrier_arrive(&rings.landed[v_at.stage]);
#endif
}

}  // namespace producer

#if VARLEN
// One warp hands on the tiles of V, with zeros for the rows behind the end of the sequence.
namespace clearer {

CUKIT_DEVICE void run(Rings& rings, unsigned char* v_tiles) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  for (cukit::Cursor<STAGES> at;; at.advance()) {
    cukit::mbarrier_wait(&rings.landed[at.stage], at.parity);
    const int rows = rings.rows[at.stage];
    if (rows < 0) return;
    if (rows < TILE_N) {
      unsigned char* const tile = v_tiles + at.stage * kValueBytes;
#pragma unroll 1
      for (int part = 0; part < kValueParts; ++part) {
        for (int byte = rows * kRowBytes + 16 * lane; byte < kKeyPart; byte += 16 * 32) {
          *reinterpret_cast<uint4*>(tile + part * kKeyPart + byte) = uint4{};
        }
      }
      cukit::fence_proxy_async();
    }
    __syncwarp();
    if (lane == 0) cukit::mbarrier_arrive(&rings.v.full[at.stage]);
  }
}

}  // namespace clearer
#endif

}  // namespace
