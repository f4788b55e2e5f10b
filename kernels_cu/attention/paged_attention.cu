// Attention over keys and values in blocks of a cache, for few queries per request.
//
// out = softmax(scale * Q K^T + mask) V as in flash_attention_sm80.cu, where key j of request b is
// row j % block_size of block block_table[b][j / block_size]. The queries are the last tokens of
// their request.
// PACKED: the queries of request b are rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q.
// RECENT: key j from packed_lens[b] on is row j % recent_rows of ring buffer rings[b], unquantised.
//
// Paper: Kwon et al., arXiv:2309.06180 (paged keys); Dao et al., Flash-Decoding (split keys); Liu
//   et al., KIVI, arXiv:2402.02750 (int4, recent keys).
// Mapping: the rows of a problem are the queries of all heads that share a key head, so a key is
//   read once for the group. Tiles of TILE = STEP * WARPS keys; a warp owns STEP keys of each, and
//   has its own accumulators, softmax state and pipeline of STAGES stages: the loop over tiles has
//   no block-wide barrier. paged_work.cuh schedules the tiles. A piece that does not cover its
//   problem is stored to `partial`; the last block to finish a piece merges the problem's pieces.
//   CLUSTER > 1: a cluster of blocks processes one problem, block r the r-th part of its tiles.
//   Each block merges HEAD_DIM / CLUSTER columns of the output, whose sums the other blocks write
//   to its shared memory.
// Shared memory, dynamic: WARPS * STAGES * kStageBytes (paged_rows.cuh) of keys, values and scales,
//   reused to merge eight rows of every warp; QUERY_TILES * 16 * HEAD_DIM bytes of queries, twice
//   with RECENT, in the column orders of both kinds of keys. CLUSTER > 1: ClusterSums.
// Macros: DTYPE float16|bfloat16; CODE of keys and values: 0 as DTYPE, 1 e4m3, 2 int8, 3 int4;
//   HEAD_DIM 64|96|128|192|256 (8-bit codes: not 96; int4: 128 only); PADDED, VALUE_PADDED 0|1 the
//   heads of Q and K, of V are smaller (the rest is zeros); QUERY_TILES 1|2|4, of 8 rows; STEP
//   16|32|64; WARPS; STAGES; UNIT_TILES 0, or tiles per unit; TEAM a divisor of the key heads and
//   of the grid; BLOCKS_PER_SM; RECENT 0|1, 1 only with CODE > 0; PACKED 0|1, without UNIT_TILES;
//   CLUSTER thread blocks of a cluster, above 1 only with TEAM 1 and without UNIT_TILES and PACKED;
//   CAUSAL, WINDOW, SOFTCAP, SINKS of score_options.cuh.
// Minimum architecture: sm_80; e4m3: sm_89. Accumulates in float in a fixed order that depends on
//   the lengths and the grid; with UNIT_TILES on the request's length alone.
// Reference: cukit/reference/paged_attention.py.
#include "attention/paged_loader.cuh"
#include "attention/paged_operands.cuh"
#include "attention/paged_sums.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/min_max_packed.cuh"
#include "common/scores/score_options.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using namespace cukit::paged;

constexpr int kQueryBytes = 2 * kRows * HEAD_DIM;  // in one column order

// Loads the queries of a problem into shared memory; zeros beyond the last row.
CUKIT_DEVICE void load_queries(unsigned char* tile, const Rows& rows, const Arrays& arrays,
                               const cukit::PagedParameters& params) {
  constexpr int kChunks = HEAD_DIM / 8;
  for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
    const int row = index / kChunks;
    const int column = index % kChunks * 8;
    cukit::Vec<T, 8> values{};
    if (row < rows.count && (!PADDED || column < params.head_dim)) {
      const T* from = arrays.q + cukit::offset_of(params.q, rows.batch(), rows.token(row, params),
                                                  rows.head(row, params));
      cukit::load(values, from + column);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      reinterpret_cast<CacheForm::product_t*>(tile)[query_place<CacheForm>(row, column + i)] =
          query_element<CacheForm>(values[i], column + i);
      if constexpr (RECENT) {
        reinterpret_cast<T*>(tile + kQueryBytes)[query_place<RecentForm>(row, column + i)] =
            values[i];
      }
    }
  }
  __syncthreads();
}

// A lane's share of a step's scales: element [m][half] is of key 16 m + 8 half + lane / 4.
template <typename F>
using Scales = float[F::kKeyTiles][2];
CUKIT_DEVICE void load_scales(Scales<CacheForm>& scales, const unsigned char* from) {
  if constexpr (CODE != 0) {
    const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
    for (int i = 0; i < 2 * CacheForm::kKeyTiles; ++i) {
      scales[i / 2][i % 2] = reinterpret_cast<const float*>(from)[8 * i + lane / 4];
    }
  }
}

#if CODE == 3
// int4: scales and zero points of values. Element [m][half] is the pair of keys k and k + 1, where
// k = 16 m + 8 half + 2 (lane % 4).
struct ValueFactors {
  unsigned scales[CacheForm::kKeyTiles][2];
  unsigned zeros[CacheForm::kKeyTiles][2];

  CUKIT_DEVICE explicit ValueFactors(const unsigned char* from) {
    const unsigned* pairs = reinterpret_cast<const unsigned*>(from) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * CacheForm::kKeyTiles; ++i) {
      scales[i / 2][i % 2] = pairs[4 * i];
      zeros[i / 2][i % 2] = pairs[4 * i + kStep / 2];
    }
  }

  // Zeroes the factors beyond the last key: their memory may hold NaN, and 0 * NaN is NaN.
  CUKIT_DEVICE void zero_beyond(int first_key, int end) {
#pragma unroll
    for (int i = 0; i < 2 * CacheForm::kKeyTiles; ++i) {
      const int left = end - (first_key + 8 * i + threadIdx.x % 4 * 2);
      const unsigned kept = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
      scales[i / 2][i % 2] &= kept;
      zeros[i / 2][i % 2] &= kept;
    }
  }

  // The largest magnitude of a lane's scales.
  CUKIT_DEVICE float top() const {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 2 * CacheForm::kKeyTiles; ++i) {
      most = cukit::max_packed<__half>(most, scales[i / 2][i % 2] & 0x7fff7fffu);
    }
    float pair[2];
    cukit::unpack<__half>(pair, most);
    return fmaxf(pair[0], pair[1]);
  }
};
#endif

// The largest magnitude of a lane's scales.
template <typename F>
CUKIT_DEVICE float top_scale(const Scales<F>& scales) {
  float top = 0.0f;
  if constexpr (F::kCode != 0) {
#pragma unroll
    for (int i = 0; i < 2 * F::kKeyTiles; ++i) top = fmaxf(top, fabsf(scales[i / 2][i % 2]));
  }
  return top;
}

// Applies the score options. Scores of masked keys and of keys from `end` on become -infinity.
template <typename F>
CUKIT_DEVICE void apply_options(Scores<F>& scores, int first_key, const Rows& rows, int seq_kv,
                                int end, const cukit::PagedParameters& params) {
  const cukit::ScoreSettings& settings = params.settings;
  const int causal_offset = seq_kv - rows.seq_q(params);
  const cukit::HeadScores head({}, settings, 0, 0, {0, 0, rows.seq_q(params), seq_kv});
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = rows.query(8 * n + lane % 4 * 2 + i, params);
      cukit::Span visible = cukit::visible_keys(query, causal_offset, seq_kv, settings);
      if constexpr (RECENT) visible.end = min(visible.end, end);
#pragma unroll
      for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& value = scores[m][n][2 * half + i];
          const int key = first_key + 16 * m + 8 * half + lane / 4;
          value = head.score(value, query, key, params.scale_log2, settings);
          if (head.masked(visible, query, key, settings)) value = -cukit::infinity();
        }
    }
}

// The unit for value scales up to `top`. int4: a power of two, at least 2^-15, so that float16
// represents its inverse exactly.
CUKIT_DEVICE float unit_of(float top) {
  if constexpr (CODE == 3) {
    constexpr float kMinUnit = 1.0f / 32768;
    return fmaxf(kMinUnit, __uint_as_float(__float_as_uint(top) & 0x7f800000u));
  }
  return top;
}

// Updates maxima that have grown and, with CODE, the unit of the values' scales, so that P times a
// scale in this unit fits float16 for any scales. Most steps update nothing. `top`: the lane's
// largest value scale.
template <typename F>
CUKIT_DEVICE void update_maxima(Sums& sums, const Scores<F>& scores, float top, float factor) {
  constexpr float kUnitGrowth = 16.0f;
  float seen[QUERY_TILES][2];
  bool grown = false;
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[n][i] = sums.max[n][i];
#pragma unroll
      for (int m = 0; m < F::kKeyTiles; ++m) {
        seen[n][i] = fmaxf(seen[n][i], fmaxf(scores[m][n][i], scores[m][n][2 + i]));
      }
      // If both are -infinity the difference is NaN, and the comparison false.
      grown |= (seen[n][i] - sums.max[n][i]) * factor > cukit::kLazyGrowth;
    }
  if constexpr (F::kCode != 0) grown |= top > kUnitGrowth * sums.unit;
  if (!__any_sync(cukit::kFullMask, grown)) return;

  float shrink_unit = 1.0f;
  if constexpr (F::kCode != 0) {
    top = CODE == 3 ? max_over_quad(top) : max_over_keys(top);
    if (top > sums.unit) {
      top = unit_of(top);
      shrink_unit = __fdividef(sums.unit, top);
      sums.unit = top;
      sums.inverse = 1.0f / top;
    }
  }
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float updated = max_over_keys(seen[n][i]);
      const float base = updated == -cukit::infinity() ? 0.0f : updated;
      const float shrink = exp2f((sums.max[n][i] - base) * factor);
      sums.max[n][i] = updated;
      sums.sum[n][i] *= shrink;
#pragma unroll
      for (int c = 0; c < kDimSteps; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums.out[c][n][2 * half + i] *= shrink * shrink_unit;
          if constexpr (RECENT) sums.recent[c][n][2 * half + i] *= shrink;
        }
    }
}

// Computes P of a step's scores as operands: transposed, times scale(m, half) for key 16 m + 8 half
// + lane / 4. Adds P, without this factor, to the row sums.
template <typename F, typename Scale>
CUKIT_DEVICE void exponentiate(Probabilities<F>& p, Sums& sums, const Scores<F>& scores,
                               float factor, Scale scale) {
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n) {
    float shift[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = sums.max[n][i] == -cukit::infinity() ? 0.0f : -sums.max[n][i] * factor;
    }
#pragma unroll
    for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weights[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[i] = exp2f(fmaf(scores[m][n][2 * half + i], factor, shift[i]));
          sums.sum[n][i] += weights[i];
          weights[i] *= scale(m, half);
        }
        const unsigned pair = cukit::pack<typename F::product_t>(weights[0], weights[1]);
        p[m][n][half] = cukit::transpose_8x8(pair);
      }
  }
}

// Adds a warp's keys of a step to the sums. `value_scales`: for 8-bit codes.
template <typename F>
CUKIT_DEVICE void add_keys(Sums& sums, const Scores<F>& scores, const unsigned char* values,
                           const Scales<F>& value_scales, float factor) {
  update_maxima<F>(sums, scores, top_scale<F>(value_scales), factor);
  Probabilities<F> p;
  exponentiate<F>(p, sums, scores, factor, [&](int m, int half) {
    return F::kCode == 0 ? 1.0f : value_scales[m][half] * sums.inverse;
  });
  multiply_values<F>(F::kCode == CODE ? sums.out : sums.recent, p, values);
}

#if CODE == 3
// The same for int4. The scales multiply the operand P after its conversion to float16, which P
// fits: it is at most 2^kLazyGrowth.
CUKIT_DEVICE void add_group(Sums& sums, const Scores<CacheForm>& scores,
                            const unsigned char* values, const ValueFactors& factors,
                            float factor) {
  using F = CacheForm;
  update_maxima<F>(sums, scores, factors.top(), factor);
  Probabilities<F> p;
  exponentiate<F>(p, sums, scores, factor, [](int, int) { return 1.0f; });
  const __half2 inverse = __float2half2_rn(sums.inverse);
#pragma unroll
  for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __half2 scale = __hmul2(as_half2(factors.scales[m][half]), inverse);
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n) {
        p[m][n][half] = as_word(__hmul2(as_half2(p[m][n][half]), scale));
      }
    }
  multiply_group_values(sums.out, p, factors.zeros, values);
}
#endif

// Adds a warp's keys of a tile of recent keys to the sums.
CUKIT_DEVICE void add_recent_keys(Sums& sums, const unsigned char* queries,
                                  const unsigned char* keys, int first_key, bool all_visible,
                                  const Rows& rows, int seq_kv, float factor,
                                  const cukit::PagedParameters& params) {
  using F = RecentForm;
  const Scales<F> none{};
  Scores<F> scores;
  multiply_keys<F>(scores, Queries<F>(queries), keys);
  if (cukit::kScoresModified || !all_visible) {
    apply_options<F>(scores, first_key, rows, seq_kv, seq_kv, params);
  }
  add_keys<F>(sums, scores, keys + kPartBytes, none, factor);
}

#if CLUSTER > 1
static_assert(TEAM == 1 && UNIT_TILES == 0 && !PACKED, "a cluster processes one problem");

// The block's part of its cluster's problem, possibly empty.
CUKIT_DEVICE Share cluster_share(const Lengths& lengths, const cukit::PagedParameters& params) {
  const int problem = blockIdx.x / CLUSTER;
  const int b = problem / params.problems;
  const Place::RequestType request(b, lengths, params);
  const int part = max(kMinShare, (request.units + CLUSTER - 1) / CLUSTER);
  const int first = part * cukit::cluster_rank();
  return {{b, problem % params.problems, first, request}, first, min(request.units, first + part)};
}
#endif

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE
__launch_bounds__(kThreads, BLOCKS_PER_SM) paged_attention(
    const T* __restrict__ q, const cache_t* __restrict__ k, const cache_t* __restrict__ v,
    const scale_t* __restrict__ k_scales, const scale_t* __restrict__ v_scales,
    const scale_t* __restrict__ k_zeros, const scale_t* __restrict__ v_zeros,
    T* __restrict__ out, float* __restrict__ lse, const int* __restrict__ block_table,
    const int* __restrict__ seq_lens,
    const T* __restrict__ recent_k, const T* __restrict__ recent_v,  // RECENT; else null
    const int* __restrict__ rings, const int* __restrict__ packed_lens,
    const float* __restrict__ sinks,
    float* partial_memory,  // Partial: two slots per block, or one per unit
    int* counters,          // zeros: one per block, or one per problem
#if PACKED
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
    int max_queries,                       // requests with more queries are skipped
#endif
    const __grid_constant__ cukit::PagedParameters params) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Statistics statistics[WARPS][kRows];
  __shared__ KeyPlace places[WARPS][Loader::kPlaces];
#if PACKED
  const Lengths lengths{{seq_lens, packed_lens}, cu_seqlens_q, max_queries};
#elif RECENT
  const Lengths lengths{seq_lens, packed_lens};
#else
  const Lengths lengths = seq_lens;
#endif
  const Arrays arrays{q, k, v, k_scales, v_scales, k_zeros, v_zeros, out, lse, block_table, lengths,
                      sinks, recent_k, recent_v, rings};
  const Partial partial{partial_memory};
  const int warp = threadIdx.x / cukit::kWarpSize;
  const unsigned char* stages = shared + warp * STAGES * kStageBytes;
  unsigned char* query_tile = shared + WARPS * STAGES * kStageBytes;
  const float factor = cukit::exponent_factor(params.scale_log2);

#if CLUSTER > 1
  cukit::cluster_arrive();
#endif
  // Prefetches the block table, which is read next, to L2 while the lengths are read.
  const long long entry = 32LL * (blockIdx.x * kThreads + threadIdx.x);
  const long long entries = static_cast<long long>(params.batch - 1) * params.table_row +
                            (params.max_keys - params.recent_rows) / params.block_size;
  if (entry < entries) cukit::prefetch_l2(block_table + entry);
#if CLUSTER > 1
  Share share = cluster_share(lengths, params);
  const Rows own_rows(share.place, params);
  auto& cluster_sums = *reinterpret_cast<ClusterSums*>(query_tile + (1 + RECENT) * kQueryBytes);
#else
  const int teams = gridDim.x / TEAM;
  const int team = blockIdx.x / TEAM;
  const int member = blockIdx.x % TEAM;
  const cukit::Total total = Place::count(lengths, params);
  const int share_units = max(kMinShare, total.share(teams));
  const int first_unit = team * share_units;
  if (first_unit >= total.units) return;
  Share share{Place::find(first_unit, lengths, params), first_unit,
              min(total.units, first_unit + share_units)};
#endif
  Loader loader(share, cukit::shared_address(stages), places[warp], arrays, params);
#pragma unroll 1  // the body is long
  for (int i = 0; i < STAGES - 1; ++i) {
    loader.start(arrays, params);
    __syncwarp();  // the next start() overwrites the addresses of the keys
  }

  int stage = 0;
  while (!share.done()) {
    const Piece piece = share.piece();
    const Rows rows(piece.place, params);
    const int seq_kv = piece.place.request.seq_kv;
    // Keys visible to every row.
    const int causal_offset = seq_kv - rows.seq_q(params);
    const int visible_begin =
        cukit::visible_keys(rows.seq_q(params) - 1, causal_offset, seq_kv, params.settings).begin;
    const int visible_end = cukit::visible_keys(0, causal_offset, seq_kv, params.settings).end;
    load_queries(query_tile, rows, arrays, params);
    const Queries<CacheForm> queries(query_tile);
    Sums sums;
    sums.clear();
    for (int tile = piece.begin; tile < piece.end; ++tile) {
      cukit::cp_async_wait<STAGES - 2>();
      __syncwarp();  // all lanes' copies are complete, and no lane reads the stage filled next
      loader.start(arrays, params);
      const unsigned char* keys = stages + stage * kStageBytes;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if constexpr (RECENT) {
        const auto& request = piece.place.request;
        if (tile >= request.cached_tiles()) {
          using F = RecentForm;
          const int first_key = request.cached + (tile - request.cached_tiles()) * kRecentTile +
                                warp * F::kStep;
          const bool all_visible =
              first_key >= visible_begin && first_key + F::kStep <= visible_end;
          add_recent_keys(sums, query_tile + kQueryBytes, keys, first_key, all_visible, rows,
                          seq_kv, factor, params);
          continue;
        }
      }
      using F = CacheForm;
      const int end = RECENT ? piece.place.request.cached : seq_kv;
      const unsigned char* factors = keys + 2 * kPartBytes;
      const int first_key = tile * kTile + warp * kStep;
      const bool masked = cukit::kScoresModified || first_key < visible_begin ||
                          first_key + kStep > (RECENT ? min(visible_end, end) : visible_end);
#if CODE == 3
      Scores<F> scores;
      GroupQueries(queries, factors).multiply(scores, keys);
      ValueFactors value_factors(factors + kKeyScaleBytes);
      if (masked) {
        apply_options<F>(scores, first_key, rows, seq_kv, end, params);
        value_factors.zero_beyond(first_key, end);
      }
      add_group(sums, scores, keys + kPartBytes, value_factors, factor);
#else
      Scores<F> scores;
      Scales<F> value_scales;
      multiply_keys<F>(scores, queries, keys);
      if constexpr (CODE != 0) {
        Scales<F> key_scales;
        load_scales(key_scales, factors);
        load_scales(value_scales, factors + kKeyScaleBytes);
#pragma unroll
        for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
          for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] *= key_scales[m][i / 2];
      }
      if (masked) apply_options<F>(scores, first_key, rows, seq_kv, end, params);
      add_keys<F>(sums, scores, keys + kPartBytes, value_scales, factor);
#endif
    }

    unsigned char* merge = shared + (stage == 0 ? STAGES - 1 : stage - 1) * kStageBytes;
#if CLUSTER > 1
    cukit::cluster_wait();
    merge_warps(sums, rows, factor, merge, statistics,
                [&](int row, int column, float2 total, const Statistics& all) {
                  cluster_sums.send(row, column, total, all);
                });
    break;
  }
  if (share.done()) {
    cukit::cluster_wait();
    cluster_sums.send_nothing();
  }
  cukit::cluster_arrive();
  cukit::cluster_wait();
  cluster_sums.merge(own_rows, arrays, params);
#else
    const int problem_first = share.index - piece.place.unit;  // the problem's first unit
    // Slots: two per block or, with UNIT_TILES, one per unit. Counters: one per block or problem.
    const cukit::PieceSlots slots(problem_first, piece.place.request.units, share_units);
    const int pieces = UNIT_TILES ? piece.place.request.units : slots.count;
    const auto slot_of = [&](int i) {
      if constexpr (UNIT_TILES > 0) {
        return static_cast<long long>(problem_first + i) * TEAM + member;
      }
      return slots.slot(i, member);
    };
    const int own = UNIT_TILES ? piece.place.unit : team - slots.first_team;
    const int counter =
        UNIT_TILES
            ? (piece.place.b * (params.problems / TEAM) + piece.place.problem) * TEAM + member
            : slots.first_team * TEAM + member;
    const long long own_slot = slot_of(own);
    merge_warps(sums, rows, factor, merge, statistics,
                [&](int row, int column, float2 total, const Statistics& all) {
                  if (piece.complete) {
                    const float by = finish_row(all, rows, row, arrays, params, column == 0);
                    store_pair(total.x * by, total.y * by, rows, row, column, arrays, params);
                    return;
                  }
                  float* to = partial.out(own_slot) + row * HEAD_DIM + column;
                  *reinterpret_cast<float2*>(to) = total;
                  if (column == 0) partial.statistics(own_slot)[row] = all;
                });
    if (!piece.complete && finishes(counters + counter, pieces)) {
      merge_pieces(rows, pieces, slot_of, partial, arrays, params);
    }
    share.advance(lengths, params);
  }
#endif
}
