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
#if CODE == 0
using cache_t = T;
using product_t = T;
#else
using cache_t = unsigned char;
using product_t = __half;
#endif

constexpr int kStep = 16;  // keys of a warp
constexpr int kTile = kStep * WARPS;
constexpr int kThreads = kWarpSize * WARPS;
constexpr int kRows = 16 * M_TILES;
constexpr int kOTiles = HEAD_DIM / 8;
constexpr int kBits = 8 * sizeof(cache_t);
constexpr int kTileColumns = HEAD_DIM * kBits / 16;     // of keys and values, in units of 16 bits
constexpr int kPartBytes = kStep * kTileColumns * 2;    // a warp's keys of a tile, or its values
constexpr int kScaleBytes = CODE ? 2 * kStep * 4 : 0;   // of its keys, then of its values
constexpr int kLeastShare = UNIT_TILES ? 1 : 4;  // smaller pieces cost more than they save
constexpr int kStageBytes = 2 * kPartBytes + kScaleBytes;
constexpr int kMergePitch = HEAD_DIM + kBits / 2;  // floats: neighbouring rows use different banks

static_assert(8 * kMergePitch * 4 <= kStageBytes, "sums of eight rows lie in a stage");

using Place = cukit::Place<kTile, UNIT_TILES>;
using Piece = cukit::Piece<kTile, UNIT_TILES>;
using Share = cukit::Share<kTile, UNIT_TILES>;

struct Arrays {
  const T* q;              // [batch, seq_q, heads_q, head_dim]
  const cache_t* k;        // [blocks, block_size, heads_kv, head_dim]
  const cache_t* v;        // the same, [..., value_dim]
  const float* k_scales;   // with CODE: [blocks, block_size, heads_kv], or 1 instead of an axis
  const float* v_scales;   // the same
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
