// The rows that paged attention computes together, and what a thread block of it keeps where.
//
// Macros: those of paged_attention.cu.
#pragma once

#include "attention/paged_work.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace cukit::paged {

using T = element_t;

constexpr int kStep = 16;  // keys of a warp
constexpr int kTile = kStep * WARPS;
constexpr int kThreads = kWarpSize * WARPS;
constexpr int kRows = 16 * M_TILES;
constexpr int kOTiles = HEAD_DIM / 8;
constexpr int kPartBytes = kStep * HEAD_DIM * 2;  // a warp's keys of a tile, or its values
constexpr int kLeastShare = UNIT_TILES ? 1 : 2;  // pieces of a tile would cost more than they save
constexpr int kStageBytes = 2 * kPartBytes;
constexpr int kMergePitch = HEAD_DIM + 8;  // floats: eight rows fall into different banks

using Place = cukit::Place<kTile, UNIT_TILES>;

struct Arrays {
  const T* q;              // [batch, seq_q, heads_q, head_dim]
  const T* k;              // [blocks, block_size, heads_kv, head_dim]
  const T* v;              // the same, [..., value_dim]
  T* out;                  // [batch, seq_q, heads_q, value_dim]
  float* lse;              // [batch, heads_q, seq_q] or null
  const int* block_table;  // [batch, table_row]
  const int* seq_lens;     // [batch]
  const float* sinks;      // [heads_q]
};

// The rows of a problem: number r is query r / group of head head_kv * group + r % group.
struct Rows {
  int b, first, count, head_kv;

  CUKIT_DEVICE Rows(const Place& place, const PagedParameters& params) {
    const int problem = place.problem * TEAM + blockIdx.x % TEAM;
    const int tile = problem / params.heads_kv;
    b = place.b;
    first = tile * kRows;
    count = min(kRows, params.group * params.seq_q - first);
    head_kv = problem % params.heads_kv;
  }
  CUKIT_DEVICE int query(int row, const PagedParameters& params) const {
    return (first + row) / params.group;
  }
  CUKIT_DEVICE int head(int row, const PagedParameters& params) const {
    return head_kv * params.group + (first + row) % params.group;
  }
};

}  // namespace cukit::paged
