// Constants, arrays and rows of paged attention.
//
// Macros: those of paged_attention.cu.
#pragma once

#ifndef RECENT
#define RECENT 0
#endif
#ifndef PACKED
#define PACKED 0
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif

#include "attention/paged_work.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace cukit::paged {

using T = element_t;
#if CODE == 0
using cache_t = T;
#else
using cache_t = unsigned char;
#endif
#if CODE == 3
using scale_t = __half;
#else
using scale_t = float;
#endif

template <int Code>
struct ProductType {
  using type = __half;
};
template <>
struct ProductType<0> {
  using type = T;
};

// Storage format of a warp's keys and values of a tile.
template <int Code, int Step>
struct Form {
  using product_t = typename ProductType<Code>::type;
  static constexpr int kCode = Code;
  static constexpr int kStep = Step;            // keys
  static constexpr int kKeyTiles = Step / 16;   // operand tiles
  static constexpr int kBits = Code == 0 ? 16 : Code == 3 ? 4 : 8;
  static constexpr int kTileColumns = HEAD_DIM * kBits / 16;   // 16-bit elements per key
  static constexpr int kPartBytes = Step * kTileColumns * 2;   // of keys, or of values
};
using CacheForm = Form<CODE, STEP>;
using RecentForm = Form<0, 16>;

constexpr int kStep = STEP;
constexpr int kTile = kStep * WARPS;
constexpr int kRecentTile = RECENT ? RecentForm::kStep * WARPS : 0;
constexpr int kThreads = kWarpSize * WARPS;
constexpr int kRows = 8 * QUERY_TILES;
constexpr int kDimSteps = HEAD_DIM / 16;
// Bytes of a warp's keys of a tile, or of its values, in any form.
constexpr int kPartBytes = RECENT && RecentForm::kPartBytes > CacheForm::kPartBytes
                               ? RecentForm::kPartBytes
                               : CacheForm::kPartBytes;
// Scales of the keys, then of the values: a float per key. int4: float16, a scale and a zero point
// for each column of the keys and for each row of the values.
constexpr int kKeyScaleBytes = CODE == 0 ? 0 : CODE == 3 ? 2 * 2 * HEAD_DIM : 4 * kStep;
constexpr int kScaleBytes = kKeyScaleBytes + (CODE == 0 ? 0 : 4 * kStep);
constexpr int kStageBytes = 2 * kPartBytes + kScaleBytes;
constexpr int kMinKeys = 256;  // per share: smaller pieces save less time than merging them takes
constexpr int kMinShare = UNIT_TILES || kTile >= kMinKeys ? 1 : kMinKeys / kTile;
constexpr int kMergePitch = HEAD_DIM + 4;  // floats: a warp's stores use different banks

static_assert(8 * kMergePitch * 4 <= kStageBytes, "eight rows of a warp fit into a stage");

// Rows of a tile of packed queries.
constexpr int kPackedRows = PACKED ? kRows : 0;
static_assert(!PACKED || UNIT_TILES == 0, "packed queries have no batch-invariant splits");

using Place = cukit::Place<kTile, UNIT_TILES, kRecentTile, kPackedRows>;
using Piece = cukit::Piece<kTile, UNIT_TILES, kRecentTile, kPackedRows>;
using Share = cukit::Share<kTile, UNIT_TILES, kRecentTile, kPackedRows>;
#if PACKED
using Lengths = PackedLengths;
#elif RECENT
using Lengths = SplitLengths;
#else
using Lengths = const int*;
#endif

struct Arrays {
  const T* q;              // [batch, seq_q, heads_q, head_dim]; PACKED: [total_q, ...]
  const cache_t* k;        // [blocks, block_size, heads_kv, head_dim]
  const cache_t* v;        // the same, [..., value_dim]
  const scale_t* k_scales;  // CODE: [blocks, block_size, heads_kv], axes may be broadcast;
                            // int4: [blocks, block_size / STEP, heads_kv, head_dim]
  const scale_t* v_scales;  // the same; int4: [blocks, block_size, heads_kv], rows contiguous
  const scale_t* k_zeros;   // int4: as k_scales
  const scale_t* v_zeros;   // int4: as v_scales
  T* out;                  // [batch, seq_q, heads_q, value_dim]
  float* lse;              // [batch, heads_q, seq_q] or null
  const int* block_table;  // [batch, table_row]
  Lengths lengths;         // [batch]
  const float* sinks;      // [heads_q]
  const T* recent_k;       // RECENT: [ring buffers, recent_rows, heads_kv, head_dim]
  const T* recent_v;       // the same, [..., value_dim]
  const int* rings;        // RECENT: [batch]
};

// The rows of a problem: row r is query r / group of head head_kv * group + r % group.
struct Rows {
  int b, first, count, head_kv;
#if PACKED
  int queries;      // number of queries of the request
  int first_query;  // row of the request's first query in q
#endif

  CUKIT_DEVICE Rows(const Place& place, const PagedParameters& params) {
    const int problem = place.problem * TEAM + blockIdx.x % TEAM;
    const int tile = problem / params.heads_kv;
    b = place.b;
    first = tile * kRows;
    count = min(kRows, params.group * place.request.seq_q(params) - first);
#if PACKED
    queries = place.request.count;
    first_query = place.request.first_query;
#endif
    head_kv = problem % params.heads_kv;
  }
  CUKIT_DEVICE int query(int row, const PagedParameters& params) const {
    return (first + row) / params.group;
  }
  CUKIT_DEVICE int head(int row, const PagedParameters& params) const {
    return head_kv * params.group + (first + row) % params.group;
  }
#if PACKED
  CUKIT_DEVICE int seq_q(const PagedParameters&) const { return queries; }
  // Indices into q, out and lse: packed requests form a single batch entry.
  CUKIT_DEVICE int batch() const { return 0; }
  CUKIT_DEVICE int token(int row, const PagedParameters& params) const {
    return first_query + query(row, params);
  }
#else
  CUKIT_DEVICE int seq_q(const PagedParameters& params) const { return params.seq_q; }
  CUKIT_DEVICE int batch() const { return b; }
  CUKIT_DEVICE int token(int row, const PagedParameters& params) const {
    return query(row, params);
  }
#endif
};

}  // namespace cukit::paged
