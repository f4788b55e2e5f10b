// Attention over keys and values in blocks of a cache, for few queries a request.
//
// out = softmax(scale * Q K^T + mask) V as in flash_attention_sm80.cu, where key j of request b is
// row j % block_size of block block_table[b][j / block_size]. The queries are the last of a request.
//
// Paper: Kwon et al., arXiv:2309.06180 (paged keys); Dao et al., Flash-Decoding (split keys).
// Mapping: the rows of a problem are the queries of all heads that share a key head, so a key is
//   read once for the group. Tiles of TILE = 16 * WARPS keys; a warp owns 16 keys of each, with
//   sums, maxima and outputs of its own and a ring of STAGES copies that no other warp waits for.
//   paged_work.cuh shares out the tiles. A piece that is not all of its problem goes to `partial`;
//   the block that finishes a problem last adds up its pieces, in their order.
// Shared memory, dynamic: WARPS * STAGES * kStageBytes, each warp's keys and values (64 * HEAD_DIM; of
//   codes half of that and 128), where eight rows of every warp lie on their way into a sum;
//   M_TILES * 32 * HEAD_DIM bytes of queries.
// Macros: DTYPE float16|bfloat16; CODE of keys and values: 0 as DTYPE, 1 e4m3, 2 int8;
//   HEAD_DIM 64|96|128|192|256, without 96 for codes; PADDED 0|1 head_dim is smaller (the rest is
//   zeros); M_TILES 1|2, of 16 rows; WARPS; STAGES; UNIT_TILES 0, or tiles a unit; TEAM a divisor of
//   the key heads and of the grid; BLOCKS_PER_SM; CAUSAL, WINDOW, SOFTCAP, SINKS of score_options.cuh.
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

// Copies a warp's keys and values, tile after tile of a share, ahead of their use.
class Loader {
 public:
  CUKIT_DEVICE Loader(const Share& share, unsigned ring, const Arrays& arrays,
                      const cukit::PagedParameters& params)
      : share_(share), ring_(ring), stage_(0), more_(!share.done()) {
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
      }
      if (more_) look_up(arrays, params);
    }
    cukit::cp_async_commit();
  }

 private:
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
  }

  // The block of this lane's key (lanes l and l + 16 share one), a step before it is needed.
  CUKIT_DEVICE void look_up(const Arrays& arrays, const cukit::PagedParameters& params) {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const int key = tile_ * kTile + threadIdx.x / cukit::kWarpSize * kStep + lane % kStep;
    block_ = -1;
    if (key >= first_key_ && key < last_key_) {
      row_ = key % params.block_size;
      block_ = arrays.block_table[static_cast<long long>(share_.place.b) * params.table_row +
                                  key / params.block_size];
    }
  }

  CUKIT_DEVICE void copy(const Arrays& arrays, const cukit::PagedParameters& params) {
    constexpr int kChunks = kTileColumns / 8;
    constexpr int kElements = 128 / kBits;  // of a chunk
    const int lane = threadIdx.x % cukit::kWarpSize;
    const unsigned keys = ring_ + stage_ * kStageBytes;
    const long long k_row = cukit::offset_of(params.k, block_, row_, head_kv_);
    const long long v_row = cukit::offset_of(params.v, block_, row_, head_kv_);
#pragma unroll
    for (int i = 0; i < kStep * kChunks / cukit::kWarpSize; ++i) {
      const int index = i * cukit::kWarpSize + lane;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const int column = chunk * kElements;
      const bool known = __shfl_sync(cukit::kFullMask, block_, row) >= 0;
      const long long from_k = __shfl_sync(cukit::kFullMask, k_row, row) + column;
      const long long from_v = __shfl_sync(cukit::kFullMask, v_row, row) + column;
      const unsigned to = keys + cukit::Swizzle<kTileColumns>::offset(row, chunk);
      const bool k_valid = known && (!PADDED || column < params.head_dim);
      const bool v_valid = known && (!VALUE_PADDED || column < params.value_dim);
      cukit::cp_async_16(to, arrays.k + (k_valid ? from_k : 0), k_valid);
      cukit::cp_async_16(to + kPartBytes, arrays.v + (v_valid ? from_v : 0), v_valid);
    }
    if constexpr (CODE != 0) {
      const bool of_keys = lane < kStep;
      const float* from = of_keys ? arrays.k_scales : arrays.v_scales;
      const bool known = block_ >= 0;
      if (known) {
        from += cukit::offset_of(of_keys ? params.k_scales : params.v_scales, block_, row_, head_kv_);
      }
      cukit::cp_async_cached<4>(keys + 2 * kPartBytes + lane * 4, from, known);
    }
  }

  Share share_;
  unsigned ring_;
  int stage_;
  bool more_;
  int tile_, piece_end_, head_kv_, first_key_, last_key_;
  int block_, row_ = 0;
};

// The rows of a problem into shared memory; zeros where there are none.
CUKIT_DEVICE void load_queries(unsigned char* tile, const Rows& rows, const Arrays& arrays,
                               const cukit::PagedParameters& params) {
  constexpr int kPairs = HEAD_DIM / 16;  // of chunks
  for (int index = threadIdx.x; index < kRows * kPairs; index += kThreads) {
    const int row = index / kPairs;
    const int column = index % kPairs * 16;
    uint4 columns[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (row < rows.count) {
      const T* from = arrays.q + cukit::offset_of(params.q, rows.b, rows.query(row, params),
                                                  rows.head(row, params));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!PADDED || column + 8 * i < params.head_dim) {
          columns[i] = *reinterpret_cast<const uint4*>(from + column + 8 * i);
        }
      }
    }
    uint4 chunks[2];
    order_queries(chunks, columns);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint4*>(tile + cukit::Swizzle<HEAD_DIM>::offset(row, column / 8 + i)) =
          chunks[i];
    }
  }
  __syncthreads();
}

// scores = Q K^T, with what is hidden at -infinity.
// `scales`: of the lane's keys, with CODE.
CUKIT_DEVICE void score(float (&scores)[M_TILES][2][4], const QOperand& q, unsigned keys,
                        const float (&scales)[2][2], int first_key, const Rows& rows, int seq_kv,
                        const cukit::PagedParameters& params) {
  multiply_keys(scores, q, KOperand(keys, 0, 0));
  if constexpr (CODE != 0) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[m][i / 4][i % 4] *= scales[i / 4][i % 2];
  }

  const cukit::ScoreSettings& settings = params.settings;
  const int past = seq_kv - params.seq_q;
  const int last = params.seq_q - 1;
  const bool all_seen = first_key >= cukit::visible_keys(last, past, seq_kv, settings).begin &&
                        first_key + kStep <= cukit::visible_keys(0, past, seq_kv, settings).end;
  if (all_seen && !cukit::kScoresModified) return;
  const cukit::HeadScores head({}, settings, 0, 0, {0, 0, params.seq_q, seq_kv});
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = rows.query(16 * m + 8 * half + lane / 4, params);
      const cukit::Span seen = cukit::visible_keys(query, past, seq_kv, settings);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = scores[m][n][2 * half + i];
          const int key = first_key + 8 * n + lane % 4 * 2 + i;
          value = head.score(value, query, key, params.scale_log2, settings);
          if (head.hidden(seen, query, key, settings)) value = -cukit::infinity();
        }
    }
}

// A lane's share of sixteen scales: element [n][i] is of key 8 n + 2 (lane % 4) + i.
CUKIT_DEVICE void load_scales(float (&scales)[2][2], const unsigned char* from) {
  if constexpr (CODE != 0) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = 8 * n + threadIdx.x % cukit::kWarpSize % 4 * 2;
      const float2 pair = reinterpret_cast<const float2*>(from)[key / 2];
      scales[n][0] = pair.x;
      scales[n][1] = pair.y;
    }
  }
}

// The scales of values as multiples of the warp's unit, which is renewed where a scale has outgrown
// it: probabilities times these multiples fit float16 whatever the scales.
CUKIT_DEVICE void take_unit(Sums& sums, float (&scales)[2][2]) {
  constexpr float kGrowth = 16.0f;
  float top = fmaxf(fmaxf(fabsf(scales[0][0]), fabsf(scales[0][1])),
                    fmaxf(fabsf(scales[1][0]), fabsf(scales[1][1])));
  top = fmaxf(top, __shfl_xor_sync(cukit::kFullMask, top, 1));
  top = fmaxf(top, __shfl_xor_sync(cukit::kFullMask, top, 2));
  if (top > kGrowth * sums.unit) {
    const float shrink = sums.unit / top;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < kOTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.out[m][n][i] *= shrink;
    sums.unit = top;
  }
  const float inverse = sums.unit > 0.0f ? 1.0f / sums.unit : 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i / 2][i % 2] *= inverse;
}

// Adds sixteen keys of a warp.
CUKIT_DEVICE void add_keys(Sums& sums, float (&scores)[M_TILES][2][4], unsigned values,
                           float (&scales)[2][2], float factor) {
  if constexpr (CODE != 0) take_unit(sums, scales);
  unsigned p[M_TILES][1][4];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    float(&own)[8] = reinterpret_cast<float(&)[8]>(scores[m]);
    float shrink[2];
    if (cukit::renew_maxima(sums.rows[m], shrink, own, factor)) {
      cukit::rescale(reinterpret_cast<float(&)[4 * kOTiles]>(sums.out[m]), shrink);
    }
    cukit::exponentiate(sums.rows[m], own, factor);
    if constexpr (CODE != 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i] *= scales[i / 4][i % 2];
    }
    cukit::pack_probabilities<product_t>(p[m], own);
  }
  multiply_values(sums.out, p, VOperand(values, 0, 0));
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
  const Arrays arrays{q, k, v, k_scales, v_scales, out, lse, block_table, seq_lens, sinks};
  const Partial partial{partial_memory};
  const int warp = threadIdx.x / cukit::kWarpSize;
  const unsigned char* warp_ring = shared + warp * STAGES * kStageBytes;
  const unsigned ring = cukit::shared_address(warp_ring);
  unsigned char* query_tile = shared + WARPS * STAGES * kStageBytes;
  const QOperand q_operand(cukit::shared_address(query_tile), 0, 0);
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

  Loader loader(share, ring, arrays, params);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) loader.start(arrays, params);

  int stage = 0;
  while (!share.done()) {
    const Piece piece = share.piece();
    const Rows rows(piece.place, params);
    const int seq_kv = piece.place.request.seq_kv;
    load_queries(query_tile, rows, arrays, params);
    Sums sums;
    cukit::clear(sums.out);
    sums.unit = 0.0f;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      sums.rows[m] = {{-cukit::infinity(), -cukit::infinity()}, {0.0f, 0.0f}};
    }
    for (int tile = piece.begin; tile < piece.end; ++tile) {
      cukit::cp_async_wait<STAGES - 2>();
      __syncwarp();  // every lane's copies have arrived, and all have left the stage that is next
      loader.start(arrays, params);
      const unsigned keys = ring + stage * kStageBytes;
      const unsigned char* scales = warp_ring + stage * kStageBytes + 2 * kPartBytes;
      float key_scales[2][2];
      float value_scales[2][2];
      load_scales(key_scales, scales);
      load_scales(value_scales, scales + 4 * kStep);
      float scores[M_TILES][2][4];
      score(scores, q_operand, keys, key_scales, tile * kTile + warp * kStep, rows, seq_kv, params);
      add_keys(sums, scores, keys + kPartBytes, value_scales, factor);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    unsigned char* merge = shared + (stage == 0 ? STAGES - 1 : stage - 1) * kStageBytes;
    const int problem_first = share.index - piece.place.unit;  // its first unit
    // Counters, as slots, are a block's own; with UNIT_TILES a unit's.
    const cukit::PieceSlots slots(problem_first, piece.place.request.units, share_units);
    const int pieces = UNIT_TILES ? piece.place.request.units : slots.count;
    const auto slot_of = [&](int i) {
      if constexpr (UNIT_TILES > 0) return static_cast<long long>(problem_first + i) * TEAM + member;
      return slots.slot(i, member);
    };
    const int own = UNIT_TILES ? piece.place.unit : team - slots.first_team;
    const int counter =
        UNIT_TILES ? (piece.place.b * (params.problems / TEAM) + piece.place.problem) * TEAM + member
                   : slots.first_team * TEAM + member;
    merge_warps(sums, rows, piece.whole, slot_of(own), factor, merge, statistics, partial, arrays,
                params);
    if (!piece.whole && finishes(counters + counter, pieces)) {
      merge_pieces(rows, pieces, slot_of, partial, arrays, params);
    }
    share.advance(seq_lens, params);
  }
}
