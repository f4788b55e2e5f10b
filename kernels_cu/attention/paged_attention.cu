// Attention over keys and values in blocks of a cache, for few queries a request.
//
// out = softmax(scale * Q K^T + mask) V as in flash_attention_sm80.cu, where key j of request b is
// row j % block_size of block block_table[b][j / block_size]. The queries are the last of a request.
//
// Paper: Kwon et al., arXiv:2309.06180 (paged keys); Dao et al., Flash-Decoding (split keys).
// Mapping: the rows of a problem are the queries of all heads that share a key head, so a key is
//   read once for the group. Tiles of TILE = STEP * WARPS keys; a warp owns STEP keys of each, with
//   sums, maxima and outputs of its own and a ring of STAGES copies that no other warp waits for.
//   paged_work.cuh shares out the tiles. A piece that is not all of its problem goes to `partial`;
//   the block that finishes a problem last adds up its pieces, in their order.
// Shared memory, dynamic: WARPS * STAGES * kStageBytes, each warp's keys and values (STEP * 4 * HEAD_DIM;
//   of codes half of that and 8 * STEP), where eight rows of every warp lie on their way into a sum;
//   QUERY_TILES * 16 * HEAD_DIM bytes of queries.
// Macros: DTYPE float16|bfloat16; CODE of keys and values: 0 as DTYPE, 1 e4m3, 2 int8;
//   HEAD_DIM 64|96|128|192|256, without 96 for codes; PADDED 0|1 head_dim is smaller (the rest is
//   zeros); QUERY_TILES 1|2|4, of 8 rows; STEP 16|32|64; WARPS; STAGES; UNIT_TILES 0, or tiles a unit;
//   TEAM a divisor of the key heads and of the grid; BLOCKS_PER_SM; CAUSAL, WINDOW, SOFTCAP, SINKS of
//   score_options.cuh.
// Minimum architecture: sm_80; e4m3: sm_89. Accumulates in float in a fixed order for given lengths
//   and grid; with UNIT_TILES the order of a request depends on its own length alone.
// Reference: cukit/reference/paged_attention.py.
#include "attention/paged_operands.cuh"
#include "attention/paged_sums.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using namespace cukit::paged;

// A run of tiles of one problem, which a block works through.
struct Piece {
  Place place;  // its first unit
  int begin, end;  // tiles of the request
  bool whole;      // all of the problem
};

// The units of the batch that a block takes, piece by piece.
struct Share {
  Place place;
  int index, end;  // units of the batch

  CUKIT_DEVICE bool done() const { return index >= end; }

  CUKIT_DEVICE Piece piece() const {
    const int left = place.request.units - place.unit;
    const int units = UNIT_TILES ? 1 : min(left, end - index);
    const int step = UNIT_TILES ? UNIT_TILES : 1;
    const int last = place.request.first_tile + place.request.tiles;
    const int begin = place.request.first_tile + place.unit * step;
    return {place, begin, min(last, begin + units * step), units == place.request.units};
  }

  CUKIT_DEVICE void advance(const int* seq_lens, const cukit::PagedParameters& params) {
    const int left = place.request.units - place.unit;
    const int units = UNIT_TILES ? 1 : min(left, end - index);
    index += units;
    place.unit += units;
    if (place.unit == place.request.units && !done()) place.next_problem(seq_lens, params);
  }
};

// Where a key and its values begin in the cache; null where no row sees the key.
struct __align__(16) KeyPlace {
  const cache_t* k;
  const cache_t* v;
};

// offset_of for numbers that are not negative: half the instructions.
CUKIT_DEVICE long long place_of(const cukit::HeadStrides& strides, unsigned block, unsigned row,
                                unsigned head) {
  return strides.batch * block + strides.row * row + strides.head * head;
}

// Copies a warp's keys and values, tile after tile of a share, ahead of their use.
class Loader {
 public:
  // `places`: of the warp's keys, in shared memory.
  CUKIT_DEVICE Loader(const Share& share, unsigned ring, KeyPlace* places, const Arrays& arrays,
                      const cukit::PagedParameters& params)
      : share_(share), ring_(ring), places_(places), stage_(0), more_(!share.done()) {
    if (more_) {
      open_piece(params);
      look_up(arrays, params);
    }
  }

  // Starts the copies of the next tile, or none after the last; one group either way.
  CUKIT_DEVICE void start(const Arrays& arrays, const cukit::PagedParameters& params) {
    if (more_) {
      copy(arrays, params);
      stage_ = stage_ + 1 == STAGES ? 0 : stage_ + 1;
      if (++tile_ == piece_end_) {
        share_.advance(arrays.seq_lens, params);
        more_ = !share_.done();
        if (more_) open_piece(params);
      } else {
        next_keys(params);
      }
      if (more_) look_up(arrays, params);
    }
    cukit::cp_async_commit();
  }

 private:
  static constexpr int kOwn = (kStep + cukit::kWarpSize - 1) / cukit::kWarpSize;  // keys of a lane

  // The lane's key number i of a step; of 16 keys two lanes share each.
  CUKIT_DEVICE static int own_key(int i) {
    return threadIdx.x % cukit::kWarpSize % kStep + i * cukit::kWarpSize;
  }

  // Whether this lane is the first of those that share a key.
  CUKIT_DEVICE static bool writes() {
    return kStep >= cukit::kWarpSize || threadIdx.x % cukit::kWarpSize < kStep;
  }

  CUKIT_DEVICE void open_piece(const cukit::PagedParameters& params) {
    const Piece piece = share_.piece();
    tile_ = piece.begin;
    piece_end_ = piece.end;
    const Rows rows(piece.place, params);
    head_kv_ = rows.head_kv;
    // What no row sees is not read: a window's blocks may have been given to others.
    const int past = piece.place.request.seq_kv - params.seq_q;
    const int last = params.seq_q - 1;
    const int seq_kv = piece.place.request.seq_kv;
    first_key_ = max(0, cukit::visible_keys(0, past, seq_kv, params.settings).begin);
    last_key_ = cukit::visible_keys(last, past, seq_kv, params.settings).end;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = first_of_tile() + own_key(i);
      entry_[i] = key / params.block_size;
      row_[i] = key % params.block_size;
    }
  }

  CUKIT_DEVICE int first_of_tile() const {
    return tile_ * kTile + threadIdx.x / cukit::kWarpSize * kStep;
  }

  // Of the tile behind, without a division.
  CUKIT_DEVICE void next_keys(const cukit::PagedParameters& params) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      entry_[i] += params.tile_blocks;
      row_[i] += params.tile_rows;
      if (row_[i] >= params.block_size) {
        row_[i] -= params.block_size;
        ++entry_[i];
      }
    }
  }

  // The blocks of the lane's keys, a step before they are needed.
  CUKIT_DEVICE void look_up(const Arrays& arrays, const cukit::PagedParameters& params) {
    const int* table = arrays.block_table + static_cast<long long>(share_.place.b) * params.table_row;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = first_of_tile() + own_key(i);
      block_[i] = key >= first_key_ && key < last_key_ ? table[entry_[i]] : -1;
    }
  }

  CUKIT_DEVICE void copy(const Arrays& arrays, const cukit::PagedParameters& params) {
    const unsigned keys = ring_ + stage_ * kStageBytes;
    bool all_known = true;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      KeyPlace place{nullptr, nullptr};
      const bool known = block_[i] >= 0;
      if (known) {
        place = {arrays.k + place_of(params.k, block_[i], row_[i], head_kv_),
                 arrays.v + place_of(params.v, block_[i], row_[i], head_kv_)};
      }
      all_known &= known;
      if (writes()) places_[own_key(i)] = place;
    }
    __syncwarp();
    if (!PADDED && !VALUE_PADDED && __all_sync(cukit::kFullMask, all_known)) {
      copy_whole(keys);
    } else {
      copy_known(keys, arrays, params);
    }
    if constexpr (CODE != 0) copy_scales(keys + 2 * kPartBytes, arrays, params);
  }

  static constexpr int kChunks = kTileColumns / 8;  // of a key
  static constexpr int kElements = 128 / kBits;     // of a chunk
  static constexpr int kCopies = kStep * kChunks / cukit::kWarpSize;

  // A lane's copy number `i` of a step: chunk `chunk` of key `row`.
  struct Copy {
    int row, chunk;
    unsigned to;  // in the tile

    CUKIT_DEVICE explicit Copy(int i) {
      using Tile = cukit::Swizzle<kTileColumns>;
      const int lane = threadIdx.x % cukit::kWarpSize;
      if constexpr (cukit::kWarpSize % kChunks == 0) {  // whole rows: copies differ by constants
        const int first = i * (cukit::kWarpSize / kChunks);
        const unsigned phase = (first >> Tile::kRowShift) & Tile::kMask;
        row = first + lane / kChunks;
        chunk = lane % kChunks;
        to = (Tile::offset(lane / kChunks, chunk) ^ (phase << 4)) + first * Tile::kPitch;
      } else {
        row = (i * cukit::kWarpSize + lane) / kChunks;
        chunk = (i * cukit::kWarpSize + lane) % kChunks;
        to = Tile::offset(row, chunk);
      }
    }
  };

  CUKIT_DEVICE void copy_whole(unsigned keys) {
    constexpr int kAtOnce = kCopies % 4 == 0 ? 4 : 3;
    static_assert(kCopies % kAtOnce == 0, "places are read a few at a time");
#pragma unroll
    for (int first = 0; first < kCopies; first += kAtOnce) {
      KeyPlace from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) from[i] = places_[Copy(first + i).row];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Copy copy(first + i);
        cukit::cp_async_16(keys + copy.to, from[i].k + copy.chunk * kElements);
        cukit::cp_async_16(keys + copy.to + kPartBytes, from[i].v + copy.chunk * kElements);
      }
    }
  }

  // Zeros for what does not exist or is not seen.
  CUKIT_DEVICE void copy_known(unsigned keys, const Arrays& arrays,
                               const cukit::PagedParameters& params) {
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const Copy copy(i);
      const int column = copy.chunk * kElements;
      const KeyPlace from = places_[copy.row];
      const bool k_valid = from.k != nullptr && (!PADDED || column < params.head_dim);
      const bool v_valid = from.v != nullptr && (!VALUE_PADDED || column < params.value_dim);
      cukit::cp_async_16(keys + copy.to, k_valid ? from.k + column : arrays.k, k_valid);
      cukit::cp_async_16(keys + copy.to + kPartBytes, v_valid ? from.v + column : arrays.v, v_valid);
    }
  }

  CUKIT_DEVICE void copy_scales(unsigned to, const Arrays& arrays,
                                const cukit::PagedParameters& params) {
    if (!writes()) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float* k = arrays.k_scales;
      const float* v = arrays.v_scales;
      if (block_[i] >= 0) {
        k += place_of(params.k_scales, block_[i], row_[i], head_kv_);
        v += place_of(params.v_scales, block_[i], row_[i], head_kv_);
        cukit::cp_async_cached<4>(to + own_key(i) * 4, k, true);
        cukit::cp_async_cached<4>(to + (kStep + own_key(i)) * 4, v, true);
      } else {
        cukit::cp_async_cached<4>(to + own_key(i) * 4, k, false);
        cukit::cp_async_cached<4>(to + (kStep + own_key(i)) * 4, v, false);
      }
    }
  }

  Share share_;
  unsigned ring_;
  KeyPlace* places_;
  int stage_;
  bool more_;
  int tile_, piece_end_, head_kv_, first_key_, last_key_;
  int entry_[kOwn], row_[kOwn], block_[kOwn];  // of the lane's keys: of the table, in its block
};

// The rows of a problem into shared memory; zeros where there are none.
CUKIT_DEVICE void load_queries(unsigned char* tile, const Rows& rows, const Arrays& arrays,
                               const cukit::PagedParameters& params) {
  constexpr int kChunks = HEAD_DIM / 8;
  for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
    const int row = index / kChunks;
    const int column = index % kChunks * 8;
    unsigned pairs[4] = {};
    if (row < rows.count && (!PADDED || column < params.head_dim)) {
      const T* from = arrays.q + cukit::offset_of(params.q, rows.b, rows.query(row, params),
                                                  rows.head(row, params));
      *reinterpret_cast<uint4*>(pairs) = *reinterpret_cast<const uint4*>(from + column);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<unsigned*>(tile)[query_place(row, column + 2 * i)] = query_pair(pairs[i]);
    }
  }
  __syncthreads();
}

// A lane's share of a step's scales: element [m][half] is of key 16 m + 8 half + lane / 4.
using Scales = float[kKeyTiles][2];
CUKIT_DEVICE void load_scales(Scales& scales, const unsigned char* from) {
  if constexpr (CODE != 0) {
    const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      scales[i / 2][i % 2] = reinterpret_cast<const float*>(from)[8 * i + lane / 4];
    }
  }
}

// Puts scores through the options; what is hidden becomes -infinity.
CUKIT_DEVICE void apply_options(Scores& scores, int first_key, const Rows& rows, int seq_kv,
                                const cukit::PagedParameters& params) {
  const cukit::ScoreSettings& settings = params.settings;
  const int past = seq_kv - params.seq_q;
  const cukit::HeadScores head({}, settings, 0, 0, {0, 0, params.seq_q, seq_kv});
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = rows.query(8 * n + lane % 4 * 2 + i, params);
      const cukit::Span seen = cukit::visible_keys(query, past, seq_kv, settings);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& value = scores[m][n][2 * half + i];
          const int key = first_key + 16 * m + 8 * half + lane / 4;
          value = head.score(value, query, key, params.scale_log2, settings);
          if (head.hidden(seen, query, key, settings)) value = -cukit::infinity();
        }
    }
}

// Renews maxima that scores have outgrown and, with CODE, the unit of the values' scales: P times a
// scale in this unit fits float16 whatever the scales. Most steps renew nothing.
CUKIT_DEVICE void renew(Sums& sums, const Scores& scores, const Scales& value_scales, float factor) {
  constexpr float kUnitGrowth = 16.0f;
  float seen[QUERY_TILES][2];
  bool outgrown = false;
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[n][i] = sums.max[n][i];
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        seen[n][i] = fmaxf(seen[n][i], fmaxf(scores[m][n][i], scores[m][n][2 + i]));
      }
      // Still -infinity on both sides gives NaN, which is not greater.
      outgrown |= (seen[n][i] - sums.max[n][i]) * factor > cukit::kLazyGrowth;
    }
  float top = 0.0f;
  if constexpr (CODE != 0) {
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) top = fmaxf(top, fabsf(value_scales[i / 2][i % 2]));
    outgrown |= top > kUnitGrowth * sums.unit;
  }
  if (!__any_sync(cukit::kFullMask, outgrown)) return;

  float shrink_unit = 1.0f;
  if constexpr (CODE != 0) {
    top = max_over_keys(top);
    if (top > sums.unit) {
      shrink_unit = __fdividef(sums.unit, top);
      sums.unit = top;
      sums.inverse = 1.0f / top;
    }
  }
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float renewed = max_over_keys(seen[n][i]);
      const float base = renewed == -cukit::infinity() ? 0.0f : renewed;
      const float shrink = exp2f((sums.max[n][i] - base) * factor);
      sums.max[n][i] = renewed;
      sums.sum[n][i] *= shrink;
#pragma unroll
      for (int c = 0; c < kDimSteps; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) sums.out[c][n][2 * half + i] *= shrink * shrink_unit;
    }
}

// Adds a warp's keys of a step.
CUKIT_DEVICE void add_keys(Sums& sums, const Scores& scores, const unsigned char* values,
                           const Scales& value_scales, float factor) {
  renew(sums, scores, value_scales, factor);
  Probabilities p;
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n) {
    float shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = sums.max[n][i] == -cukit::infinity() ? 0.0f : -sums.max[n][i] * factor;
    }
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weights[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[i] = exp2f(fmaf(scores[m][n][2 * half + i], factor, shift[i]));
          sums.sum[n][i] += weights[i];
          if constexpr (CODE != 0) weights[i] *= value_scales[m][half] * sums.inverse;
        }
        const unsigned pair = cukit::pack<product_t>(weights[0], weights[1]);
        p[m][n][half] = cukit::transpose_8x8(pair);
      }
  }
  multiply_values(sums.out, p, values);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) paged_attention(
    const T* __restrict__ q, const cache_t* __restrict__ k, const cache_t* __restrict__ v,
    const float* __restrict__ k_scales, const float* __restrict__ v_scales, T* __restrict__ out,
    float* __restrict__ lse, const int* __restrict__ block_table, const int* __restrict__ seq_lens,
    const float* __restrict__ sinks,
    float* partial_memory,  // see Partial: two slots a block, or one a unit
    int* counters,          // zeros: one a block, or one a problem
    const __grid_constant__ cukit::PagedParameters params) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Statistics statistics[WARPS][kRows];
  __shared__ KeyPlace places[WARPS][kStep];
  const Arrays arrays{q, k, v, k_scales, v_scales, out, lse, block_table, seq_lens, sinks};
  const Partial partial{partial_memory};
  const int warp = threadIdx.x / cukit::kWarpSize;
  const unsigned char* ring = shared + warp * STAGES * kStageBytes;
  unsigned char* query_tile = shared + WARPS * STAGES * kStageBytes;
  const float factor = cukit::exponent_factor(params.scale_log2);

  const int teams = gridDim.x / TEAM;
  const int team = blockIdx.x / TEAM;
  const int member = blockIdx.x % TEAM;
  const int total = Place::count(seq_lens, params);
  const int share_units = max(kLeastShare, (total + teams - 1) / teams);
  const int first_unit = team * share_units;
  if (first_unit >= total) return;
  Share share{Place::find(first_unit, seq_lens, params), first_unit,
              min(total, first_unit + share_units)};

  Loader loader(share, cukit::shared_address(ring), places[warp], arrays, params);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    loader.start(arrays, params);
    __syncwarp();  // the next start renews the places of the keys
  }

  int stage = 0;
  while (!share.done()) {
    const Piece piece = share.piece();
    const Rows rows(piece.place, params);
    const int seq_kv = piece.place.request.seq_kv;
    // Keys that every row sees.
    const int past = seq_kv - params.seq_q;
    const int seen_begin =
        cukit::visible_keys(params.seq_q - 1, past, seq_kv, params.settings).begin;
    const int seen_end = cukit::visible_keys(0, past, seq_kv, params.settings).end;
    load_queries(query_tile, rows, arrays, params);
    const Queries queries(query_tile);
    Sums sums;
    sums.clear();
    for (int tile = piece.begin; tile < piece.end; ++tile) {
      cukit::cp_async_wait<STAGES - 2>();
      __syncwarp();  // every lane's copies have arrived, and all have left the stage that is next
      loader.start(arrays, params);
      const unsigned char* keys = ring + stage * kStageBytes;
      Scales key_scales;
      Scales value_scales;
      load_scales(key_scales, keys + 2 * kPartBytes);
      load_scales(value_scales, keys + 2 * kPartBytes + 4 * kStep);
      Scores scores;
      multiply_keys(scores, queries, keys);
      if constexpr (CODE != 0) {
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
          for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] *= key_scales[m][i / 2];
      }
      const int first_key = tile * kTile + warp * kStep;
      if (cukit::kScoresModified || first_key < seen_begin || first_key + kStep > seen_end) {
        apply_options(scores, first_key, rows, seq_kv, params);
      }
      add_keys(sums, scores, keys + kPartBytes, value_scales, factor);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    unsigned char* merge = shared + (stage == 0 ? STAGES - 1 : stage - 1) * kStageBytes;
    const int problem_first = share.index - piece.place.unit;  // its first unit
    const int problem_last = problem_first + piece.place.request.units - 1;
    // Slots and counters of a piece. Without UNIT_TILES they are its block's: the first piece of a
    // block may be the end of a problem, its last one the beginning of another.
    const int first_team = problem_first / share_units;
    const int pieces = UNIT_TILES ? piece.place.request.units
                                  : problem_last / share_units - first_team + 1;
    const auto slot_of = [&](int i) {
      if constexpr (UNIT_TILES > 0) return static_cast<long long>(problem_first + i) * TEAM + member;
      const bool begins_inside = i == 0 && problem_first % share_units != 0;
      return 2LL * ((first_team + i) * TEAM + member) + begins_inside;
    };
    const int own = UNIT_TILES ? piece.place.unit : team - first_team;
    const int counter =
        UNIT_TILES ? (piece.place.b * (params.problems / TEAM) + piece.place.problem) * TEAM + member
                   : first_team * TEAM + member;
    merge_warps(sums, rows, piece.whole, slot_of(own), factor, merge, statistics, partial, arrays,
                params);
    if (!piece.whole && finishes(counters + counter, pieces)) {
      merge_pieces(rows, pieces, slot_of, partial, arrays, params);
    }
    share.advance(seq_lens, params);
  }
}
