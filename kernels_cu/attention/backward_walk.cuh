// What a block of the Hopper backward walks over, and the thread that fetches it.
//
// Macros: HEAD_DIM columns of a tile; COLUMNS of Q and K and VALUE_COLUMNS of V and dO, multiples of 32,
//   that are multiplied, as HEAD_DIM where they are not defined; TILE_M queries, TILE_N keys of a tile,
//   STAGES, those of score_options.cuh.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ring.cuh"
#include "common/scores/score_options.cuh"

#ifndef COLUMNS
#define COLUMNS HEAD_DIM
#endif
#ifndef VALUE_COLUMNS
#define VALUE_COLUMNS HEAD_DIM
#endif

namespace cukit::backward {

constexpr int kParts = HEAD_DIM / 64;
constexpr int kRowBytes = 128;  // of a part
constexpr int kQueryPart = TILE_M * kRowBytes;
constexpr int kKeyPart = TILE_N * kRowBytes;
constexpr int kQueryBytes = kParts * kQueryPart;
constexpr int kKeyBytes = kParts * kKeyPart;

// Parts of a tile that hold any of `columns`. The others are neither fetched nor multiplied.
constexpr int parts_of(int columns) { return (columns + 63) / 64; }

constexpr int kAdders = 2;

// dQ on its way to global memory: what those who add wait for, and what they wait for.
struct Sums {
  Mbarrier staged[kAdders];  // in shared memory there is a tile, or part of one, for this adder
  Mbarrier read[kAdders];    // the copy engine has read it
  Mbarrier grad_out_read[STAGES];  // wide heads: the stage of dO may be written to
};

// `lse` comes with a stage of Q, `delta` with one of dO.
struct Shared {
  Ring<STAGES> q;
  Ring<STAGES> grad_out;
  Sums sums;
  Mbarrier keys;
  Mbarrier values;
  alignas(16) float lse[STAGES][TILE_M];
  alignas(16) float delta[STAGES][TILE_M];
};

// Tiles in shared memory: parts of 64 columns, rows of 128 swizzled bytes.
struct Tiles {
  unsigned char* k;
  unsigned char* v;
  unsigned char* q;         // stages
  unsigned char* grad_out;  // stages
  unsigned char* scores;    // P and dS
  unsigned char* dq;        // what warps add to global memory
};

// Where a tensor map has a sequence: its first row, and the position on the outermost axis.
struct MapPlace {
  int row, outer;
};

// A block's keys, and the tiles of queries that see them: of each head in turn, from start_tile to
// end_tile - 1 and on from first_tile.
struct Walk {
  const ScoreArrays arrays;
  const ScoreSettings& settings;
  MapPlace map_q, map_kv;
  int batch, key_head, first_key;
  int keys_left;   // to the end of the sequence
  int past;        // query i stands opposite key i + past
  int first_head;  // of q
  int tiles;       // of queries, of a head, in the scratch
  int key_tiles;   // of a key head
  int first_scratch_tile;  // of the first head: tiles of all heads before it
  int first_tile, start_tile, steps;
  int seen_end;  // WINDOW, VARLEN

  CUKIT_DEVICE int end_tile() const { return WINDOW || VARLEN ? seen_end : tiles; }
};

// One tile of queries after the other.
struct Position {
  int head = 0;
  int tile;

  CUKIT_DEVICE explicit Position(const Walk& walk) : tile(walk.start_tile) {}

  // First row of the scratch arrays.
  CUKIT_DEVICE long long scratch_row(const Walk& walk) const {
    return (static_cast<long long>(walk.first_scratch_tile) +
            static_cast<long long>(head) * walk.tiles + tile) * TILE_M;
  }

  CUKIT_DEVICE void advance(const Walk& walk) {
    if (++tile == walk.end_tile()) tile = walk.first_tile;
    if (tile == walk.start_tile) ++head;
  }
};

// Fetches the parts of a tile that hold any of `Columns`, and `more_bytes` announced for the same
// barrier. A box wholly outside the tensor is never asked for: TMA then touches the address where the
// map begins, which for maps of sequences (encode_sequence_map) need not be mapped memory.
template <int Columns>
CUKIT_DEVICE void fetch_tile(unsigned char* tile, int part_bytes, const TensorMap* map,
                             Mbarrier* full, const MapPlace& place, int row, int head,
                             int more_bytes = 0) {
  constexpr int kFetched = parts_of(Columns);
  mbarrier_arrive_expect(full, kFetched * part_bytes + more_bytes);
#pragma unroll 1
  for (int part = 0; part < kFetched; ++part) {
    tma_load_4d(tile + part * part_bytes, map, full, part * 64, head, place.row + row, place.outer);
  }
}

// One thread's work.
CUKIT_DEVICE void fetch(Shared& shared, const Tiles& tiles, const TensorMap* q,
                      const TensorMap* k, const TensorMap* v,
                      const TensorMap* grad_out, const float* lse_log2, const float* delta,
                      const Walk& walk) {
  Cursor<STAGES> at;
  Position position(walk);
  for (int step = 0; step < walk.steps; ++step) {
    const int row = position.tile * TILE_M;
    const int head = walk.first_head + position.head;
    const long long statistics = position.scratch_row(walk);
    if (step == 0) {
      fetch_tile<COLUMNS>(tiles.k, kKeyPart, k, &shared.keys, walk.map_kv, walk.first_key,
                          walk.key_head);
    }
    Mbarrier* full = &shared.q.full[at.stage];
    mbarrier_wait(&shared.q.empty[at.stage], at.parity ^ 1);
    fetch_tile<COLUMNS>(tiles.q + at.stage * kQueryBytes, kQueryPart, q, full, walk.map_q, row, head,
                        TILE_M * 4);
    bulk_load(shared.lse[at.stage], lse_log2 + statistics, TILE_M * 4, full);
    if (step == 0) {
      fetch_tile<VALUE_COLUMNS>(tiles.v, kKeyPart, v, &shared.values, walk.map_kv, walk.first_key,
                                walk.key_head);
    }
    full = &shared.grad_out.full[at.stage];
    mbarrier_wait(&shared.grad_out.empty[at.stage], at.parity ^ 1);
    fetch_tile<VALUE_COLUMNS>(tiles.grad_out + at.stage * kQueryBytes, kQueryPart, grad_out, full,
                              walk.map_q, row, head, TILE_M * 4);
    bulk_load(shared.delta[at.stage], delta + statistics, TILE_M * 4, full);
    at.advance();
    position.advance(walk);
  }
}

}  // namespace cukit::backward
