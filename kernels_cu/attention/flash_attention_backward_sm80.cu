// Gradients of exact attention: dK and dV, and dQ accumulated in float32.
//
//   P = exp(scale * Q K^T - lse)      dV = P^T dO      dP = dO V^T
//   dS = P * (dP - delta)             dK = scale * dS^T Q      dQ = scale * dS K
//
// The score options (score_options.cuh) change P as in the forward; dS is also multiplied by the
// derivative of a softcap.
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
// Mapping: a block owns TILE_N keys of one key head and iterates over the queries of `group` query
//   heads in tiles of TILE_M, so that dK and dV accumulate in registers in a fixed order. If there
//   are too few tiles of keys to fill the GPU, `splits` blocks share a tile, SPLIT is 1, and each
//   writes its own sum in float32 (flash_attention_backward_sum adds the sums). The warps of a
//   block divide each product as a grid of SCORE_WARPS rows of warps for the scores (queries x
//   keys), KEY_WARPS rows for dK and dV (keys x head_dim), QUERY_WARPS rows for dQ (queries x
//   head_dim). They exchange P and dS through shared memory.
//   Without a mask, block n starts at query tile n and wraps around, so that at any time the blocks
//   of a head add to different rows of dQ.
// DISTILL: V and dO are a teacher's keys and queries, delta is its lse. dS is the difference of the
//   two probabilities, dS = P - exp(teacher_scale * dO V^T - delta), and there is no dV.
//   attention_kl_backward_prepare subtracts the logarithm of a row's weight from `lse_log2` and
//   `delta`.
// `lse_log2` is +infinity for rows beyond the last query and for queries without a visible key, so
// that P is 0.
// Shared memory, bytes: 2 (HEAD_DIM + VALUE_DIM) (TILE_N + STAGES TILE_M) + 4 TILE_M TILE_N
//   + 8 STAGES TILE_M:  K | V | Q stages | dO stages | P | dS | (lse, delta) stages
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than
//   HEAD_DIM; TILE_M, TILE_N; STAGES 1|2; THREADS; SCORE_WARPS, KEY_WARPS, QUERY_WARPS;
//   QUERY_PASSES: a warp computes its dQ in this number of column ranges, to limit registers;
//   QUERY_GRADIENT 0|1 whether to add to `grad_q_sum`; SPLIT 0|1; BLOCKS_PER_SM; those of
//   score_options.cuh; DISTILL, default 0.
// Minimum architecture: sm_80. Accumulates in float. dK and dV are deterministic; dQ is not: its
//   atomic additions are unordered (flash_attention_backward_query_sm80.cu is deterministic).
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "attention/parameters.cuh"
#include "attention/query_gradient.cuh"
#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

#ifndef DISTILL
#define DISTILL 0
#endif

namespace {

using T = cukit::element_t;

constexpr int kWarps = THREADS / cukit::kWarpSize;
constexpr int kQueryBytes = TILE_M * HEAD_DIM * 2;
constexpr int kGradOutBytes = TILE_M * VALUE_DIM * 2;
constexpr int kKeyBytes = TILE_N * HEAD_DIM * 2;
constexpr int kValueBytes = TILE_N * VALUE_DIM * 2;
constexpr int kScoreBytes = TILE_M * TILE_N * 2;
constexpr int kToGradOut = STAGES * kQueryBytes;  // bytes from stage 0 of Q to stage 0 of dO

// A warp's share of each product: rows and columns.
constexpr int kScoreRows = TILE_M / SCORE_WARPS;
constexpr int kScoreCols = TILE_N / (kWarps / SCORE_WARPS);
constexpr int kKeyRows = TILE_N / KEY_WARPS;
constexpr int kKeyCols = HEAD_DIM / (kWarps / KEY_WARPS);
constexpr int kValueCols = VALUE_DIM / (kWarps / KEY_WARPS);
constexpr int kQueryRows = TILE_M / QUERY_WARPS;
constexpr int kQueryCols = HEAD_DIM / (kWarps / QUERY_WARPS);
constexpr int kPassCols = kQueryCols / QUERY_PASSES;

static_assert(kScoreRows % 16 == 0 && kScoreCols % 16 == 0,
              "scores: complete 16x16 blocks per warp");
static_assert(kKeyRows % 16 == 0 && kKeyCols % 16 == 0 && kValueCols % 16 == 0,
              "dK, dV: complete 16x16 blocks per warp");
static_assert(kQueryRows % 16 == 0 && kPassCols % 16 == 0, "dQ: complete 16x16 blocks per warp");

using QueryCopy = cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
using GradOutCopy = cukit::TileCopy<TILE_M, VALUE_DIM, THREADS, VALUE_PADDED>;
using KeyCopy = cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;
using ValueCopy = cukit::TileCopy<TILE_N, VALUE_DIM, THREADS, VALUE_PADDED>;

#if SPLIT
using Gradient = float;
#else
using Gradient = T;
#endif

using Scores = float[kScoreRows / 16][kScoreCols / 8][4];
using KeyGradient = float[kKeyRows / 16][kKeyCols / 8][4];
using ValueGradient = float[kKeyRows / 16][kValueCols / 8][4];
using QueryGradient = float[kQueryRows / 16][kPassCols / 8][4];

// With HEAD_DIM == VALUE_DIM, Q and dO (and K and V) share the address register of an operand: the
// caller passes the distance in bytes from one tile to the other. Otherwise each has its own
// operand.
constexpr bool kSameShape = HEAD_DIM == VALUE_DIM;

template <typename First, typename Second>
CUKIT_DEVICE auto shared_or(const First& first, const Second& second) {
  if constexpr (kSameShape) {
    return first;
  } else {
    return second.rederived();
  }
}

// A warp's product of tiles in shared memory; the inner extent is K.
template <int K, int MT, int NT, typename Left, typename Right>
CUKIT_DEVICE void multiply(float (&acc)[MT][NT][4], const Left& left, const Right& right) {
  cukit::warp_product<T, K / 16>(acc, left, right);
}

// ---- Work of a block ----

CUKIT_DEVICE cukit::HeadTile key_tile_of(int block, const cukit::MappedKeyParameters& params) {
  const int key_tiles = (params.seq_kv + TILE_N - 1) / TILE_N;
  return cukit::head_tile(block, params.batch * params.heads, key_tiles, params.raster_group_heads);
}

// The steps of a block: the visible tiles of queries of one query head, then those of the next head
// of the group.
struct QuerySteps {
  cukit::TileRange tiles;
  int tiles_per_head;
  int rotation;  // each head starts this many tiles after the first and wraps around

  // The query head of a step, relative to the group's first head.
  CUKIT_DEVICE int head_of(int step) const { return step / tiles_per_head; }
  CUKIT_DEVICE int tile_of(int step) const {
    const int tile = tiles.begin + step % tiles_per_head + rotation;
    return tile < tiles.end ? tile : tile - tiles_per_head;
  }
};

// A warp's first row and column in each of the products.
struct WarpShare {
  int lane, score_row, score_col, key_row, key_col, value_col, query_row, query_col;

  CUKIT_DEVICE WarpShare() {
    const int warp = threadIdx.x / cukit::kWarpSize;
    lane = threadIdx.x % cukit::kWarpSize;
    score_row = warp % SCORE_WARPS * kScoreRows;
    score_col = warp / SCORE_WARPS * kScoreCols;
    key_row = warp % KEY_WARPS * kKeyRows;
    key_col = warp / KEY_WARPS * kKeyCols;
    value_col = warp / KEY_WARPS * kValueCols;
    query_row = warp % QUERY_WARPS * kQueryRows;
    query_col = warp / QUERY_WARPS * kQueryCols;
  }
};

// Addresses in shared memory.
struct Tiles {
  unsigned k, v, q, grad_out, p, ds, statistics;

  CUKIT_DEVICE explicit Tiles(unsigned shared)
      : k(shared),
        v(k + kKeyBytes),
        q(v + kValueBytes),
        grad_out(q + kToGradOut),
        p(grad_out + STAGES * kGradOutBytes),
        ds(p + kScoreBytes),
        statistics(ds + kScoreBytes) {}
};

// ---- One tile of queries ----

// Issues the copies of a tile of Q and dO, whose first row in the sequence is `first_row`, and of
// its lse and delta, to a stage. scratch_row() returns the scratch row of `first_row`.
template <typename ScratchRow>
CUKIT_DEVICE void copy_queries(const Tiles& tiles, int stage, const T* q, const T* grad_out,
                               const float* lse_log2, const float* delta, int head, int first_row,
                               int seq_q, const ScratchRow& scratch_row,
                               const cukit::KeyGradientParameters& arrays) {
  QueryCopy::start(tiles.q + stage * kQueryBytes,
                   q + cukit::offset_of(arrays.q, 0, first_row, head), arrays.q.row,
                   seq_q - first_row, arrays.work.head_dim);
  GradOutCopy::start(tiles.grad_out + stage * kGradOutBytes,
                     grad_out + cukit::offset_of(arrays.grad_out, 0, first_row, head),
                     arrays.grad_out.row, seq_q - first_row, arrays.work.value_dim);
  const int chunk = threadIdx.x;
  if (chunk < TILE_M / 2) {
    const float* from = chunk < TILE_M / 4 ? lse_log2 : delta;
    cukit::cp_async_16(tiles.statistics + (stage * TILE_M / 2 + chunk) * 16,
                       from + scratch_row() + chunk % (TILE_M / 4) * 4);
  }
  cukit::cp_async_commit();
}

// The score options of a tile of queries of one head.
struct TileOptions {
  const cukit::HeadScores& head;
  const cukit::ScoreSettings& settings;
  bool unmasked, crosses_last_key;  // see apply_options
  int lane_query, lane_key;         // of the lane's first score

  CUKIT_DEVICE void apply(Scores& scores, float scale_log2) const {
#pragma unroll
    for (int m = 0; m < kScoreRows / 16; ++m) {
      cukit::apply_options(cukit::flat(scores[m]), {lane_query + 16 * m, lane_key}, head,
                           scale_log2, settings, unmasked, crosses_last_key);
    }
  }

  // The probability of a score, `row` rows and `column` columns from the lane's first. SOFTCAP:
  // `score` is still the plain product, and the options are applied here, since the derivative
  // `slope` of the cap is computed from the product too.
  CUKIT_DEVICE float probability(float score, float row_lse, int row, int column, float scale_log2,
                                 float& slope) const {
    if constexpr (SOFTCAP) {
      const int query = lane_query + row, key = lane_key + column;
      const float value = head.score(score, query, key, scale_log2, settings, slope);
      const cukit::Span visible =
          cukit::visible_keys(query, head.causal_offset, head.seq_kv, settings);
      const bool masked = !unmasked && head.masked(visible, query, key, settings);
      return masked ? 0.0f : exp2f(value - row_lse);
    } else {
      slope = 1.0f;
      return exp2f(fmaf(score, cukit::exponent_factor(scale_log2), -row_lse));
    }
  }
};

// Stores two neighbouring elements of dS and, unless DISTILL, of P to shared memory. `p`:
// probabilities; `dp`: elements of dP or, with DISTILL, the teacher's scores; `slope`: derivatives
// of the softcap.
CUKIT_DEVICE void store_pair(unsigned char* to, float p0, float p1, const float* dp,
                             const float (&slope)[2], float row_delta,
                             const cukit::MappedKeyParameters& params) {
#if DISTILL
  *reinterpret_cast<unsigned*>(to + kScoreBytes) =
      cukit::pack<T>(p0 - exp2f(fmaf(dp[0], params.teacher_scale_log2, -row_delta)),
                     p1 - exp2f(fmaf(dp[1], params.teacher_scale_log2, -row_delta)));
#else
  *reinterpret_cast<unsigned*>(to) = cukit::pack<T>(p0, p1);
  *reinterpret_cast<unsigned*>(to + kScoreBytes) = cukit::pack<T>(
      p0 * (dp[0] - row_delta) * slope[0], p1 * (dp[1] - row_delta) * slope[1]);
#endif
}

// Adds one pass of the warp's dQ accumulators to the float32 scratch. `sum`: block at the warp's
// first row and column; `column`: the pass's first column, relative to the warp's.
CUKIT_DEVICE void add_query_gradient(float* sum, int column, const QueryGradient& dq, int lane) {
#pragma unroll
  for (int m = 0; m < kQueryRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kPassCols / 8; ++n) {
      cukit::add_to_query_block(sum + cukit::query_block<HEAD_DIM>(16 * m, column + 8 * n), lane,
                                dq[m][n]);
    }
}

// ---- Epilogue ----

// Calls store(row, column, low, high) for each pair of neighbours in the warp's dK or dV, whose
// first column is `first_col`. `column` is the first of the eight that a quad holds; the lane's
// pair starts 2 * (lane % 4) columns further.
template <int NT, typename Store>
CUKIT_DEVICE void for_each_pair(const float (&gradient)[kKeyRows / 16][NT][4],
                                const WarpShare& share, int first_col, const Store& store) {
#pragma unroll
  for (int m = 0; m < kKeyRows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int row = share.key_row + 16 * m + 8 * half + share.lane / 4;
        const float* pair = &gradient[m][n][2 * half];
        store(row, first_col + 8 * n, pair[0], pair[1]);
      }
}

// Stores a warp's dK or dV times `scale`: with SPLIT as float32 to global memory, otherwise as T to
// a tile in shared memory.
template <int Columns, bool Padded, int NT>
CUKIT_DEVICE void store_gradient(Gradient* to, long long row_stride, int columns, int keys,
                                 unsigned char* tile, const float (&gradient)[kKeyRows / 16][NT][4],
                                 const WarpShare& share, int first_col, float scale) {
  for_each_pair(gradient, share, first_col, [&](int row, int column, float low, float high) {
#if SPLIT
    column += share.lane % 4 * 2;
    if (row >= keys || (Padded && column >= columns)) return;
    *reinterpret_cast<float2*>(to + row * row_stride + column) =
        make_float2(low * scale, high * scale);
#else
    const unsigned at = cukit::Swizzle<Columns>::offset(row, column / 8) + share.lane % 4 * 4;
    *reinterpret_cast<unsigned*>(tile + at) = cukit::pack<T>(low * scale, high * scale);
#endif
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_backward_sm80(
    const T* __restrict__ q,         // [batch, seq_q, heads * group, head_dim]
    const T* __restrict__ k,         // [batch, seq_kv, heads / splits, head_dim]
    const T* __restrict__ v,         // [batch, seq_kv, heads / splits, value_dim]
    const T* __restrict__ grad_out,  // [batch, seq_q, heads * group, value_dim]
    const float* __restrict__ lse_log2,  // scratch rows (scratch_rows.cuh)
    const float* __restrict__ delta,     // scratch rows
    float* __restrict__ grad_q_sum,      // scratch rows of HEAD_DIM, initially zeros
    Gradient* __restrict__ grad_k,   // [batch, seq_kv, heads, head_dim], rows strided
    Gradient* __restrict__ grad_v,   // [batch, seq_kv, heads, value_dim], rows strided
    const float* __restrict__ alibi_slopes, const float* __restrict__ sinks,  // ScoreArrays
    const cukit::bias_t* __restrict__ bias, const unsigned char* __restrict__ mask,
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
#if DISTILL
    const float* __restrict__ upstream,  // scalar or null (1): factor of dK
#endif
    const __grid_constant__ cukit::KeyGradientParameters arrays) {
  const cukit::MappedKeyParameters& params = arrays.work;
  const cukit::ScoreSettings& settings = params.settings;
  const float scale_log2 = params.scale_log2;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const Tiles tiles(cukit::shared_address(shared));
  unsigned char* const p_bytes = shared + (tiles.p - tiles.k);
  float* const statistics = reinterpret_cast<float*>(p_bytes + 2 * kScoreBytes);

  const int heads_q = params.heads * params.group;
  const cukit::HeadTile work = key_tile_of(blockIdx.x, params);
  const int b = work.head / params.heads;
  const int key_head = work.head % params.heads;  // `splits` of them share a head of k
  const cukit::Sequence sequence =
      cukit::sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv);
  const int first_key = work.tile * TILE_N;
  const int keys_left = sequence.seq_kv - first_key;
  if (VARLEN && keys_left <= 0) return;
  const int seq_q = sequence.seq_q;
  const int causal_offset = sequence.seq_kv - seq_q;
  const cukit::TileRange query_range =
      cukit::query_tiles<TILE_M>(first_key, min(TILE_N, keys_left), causal_offset, seq_q, settings);
  const int tiles_per_head = query_range.end - query_range.begin;
  const int steps = tiles_per_head * params.group;
  const int rotation =
      CAUSAL || WINDOW || query_range.end == 0 ? 0 : work.tile % query_range.end;
  const QuerySteps query_steps{query_range, tiles_per_head, rotation};

  q += cukit::offset_of(arrays.q, b, sequence.first_q, key_head * params.group);
  grad_out += cukit::offset_of(arrays.grad_out, b, sequence.first_q, key_head * params.group);
  k += cukit::offset_of(arrays.k, b, sequence.first_kv + first_key, key_head / params.splits);
#if DISTILL
  const int value_head = key_head * params.group / params.teacher_group;
#else
  const int value_head = key_head / params.splits;
#endif
  v += cukit::offset_of(arrays.v, b, sequence.first_kv + first_key, value_head);

  const auto scratch_row = [&](int step) {
    return cukit::scratch_row(b, key_head * params.group + query_steps.head_of(step), heads_q,
                              params.rows_per_head, sequence.first_q) +
           query_steps.tile_of(step) * TILE_M;
  };
  const auto copy_step = [&](int step, int stage) {
    copy_queries(tiles, stage, q, grad_out, lse_log2, delta, query_steps.head_of(step),
                 query_steps.tile_of(step) * TILE_M, seq_q, [&] { return scratch_row(step); },
                 arrays);
  };
  KeyCopy::start(tiles.k, k, arrays.k.row, keys_left, params.head_dim);
  ValueCopy::start(tiles.v, v, arrays.v.row, keys_left, params.value_dim);
  if (steps > 0) copy_step(0, 0);
  cukit::cp_async_commit();

  const WarpShare share;
  // Queries as rows, keys as columns: S and dP.
  const cukit::LeftMK<HEAD_DIM> score_left(tiles.q, share.score_row, 0);
  const cukit::RightNK<HEAD_DIM> score_right(tiles.k, share.score_col, 0);
  const cukit::LeftMK<VALUE_DIM> grad_left(tiles.grad_out, share.score_row, 0);
  const cukit::RightNK<VALUE_DIM> grad_right(tiles.v, share.score_col, 0);
  // Keys as rows, head_dim as columns: dK and dV. dS is kScoreBytes after P.
  const cukit::LeftKM<TILE_N, kKeyRows> key_left(tiles.p, 0, share.key_row);
  const cukit::RightKN<HEAD_DIM, kKeyCols> key_right(tiles.q, 0, share.key_col);
  const cukit::RightKN<VALUE_DIM, kValueCols> value_right(tiles.grad_out, 0, share.value_col);
  // Queries as rows, head_dim as columns: dQ.
  const cukit::LeftMK<TILE_N> query_left(tiles.ds, share.query_row, 0);
  const cukit::RightKN<HEAD_DIM, kQueryCols> query_right(tiles.k, 0, share.query_col);

  KeyGradient dk;
  cukit::clear(dk);
#if !DISTILL
  ValueGradient dv;
  cukit::clear(dv);
#endif

  for (int step = 0; step < steps; ++step) {
    const int stage = STAGES == 2 ? step % 2 : 0;
    const int stage_bytes = stage * kQueryBytes;
    const int grad_out_bytes = kSameShape ? stage_bytes + kToGradOut : stage * kGradOutBytes;
    cukit::cp_async_wait<0>();
    __syncthreads();  // the step's copies are complete, and all warps have ended the previous step
    if (STAGES == 2 && step + 1 < steps) copy_step(step + 1, stage ^ 1);

    const int tile = query_steps.tile_of(step);
    const float* lse = statistics + stage * 2 * TILE_M + share.score_row + share.lane / 4;
    const auto q_left = score_left.rederived();
    const auto k_right = score_right.rederived();

    // S and dP, then P and dS.
    Scores p, dp;
    cukit::clear(p);
    multiply<HEAD_DIM>(
        p, [&](unsigned(&r)[4], int m, int i) { q_left(r, 16 * m, 16 * i, stage_bytes); },
        [&](unsigned(&r)[4], int n, int i) { k_right(r, 8 * n, 16 * i); });
    const cukit::HeadScores head({alibi_slopes, sinks, bias, mask}, settings, b,
                                 key_head * params.group + query_steps.head_of(step), sequence);
    const TileOptions options{head,
                              settings,
                              keys_left >= TILE_N && query_range.unmasked(tile),
                              keys_left < TILE_N,
                              tile * TILE_M + share.score_row + share.lane / 4,
                              first_key + share.score_col + share.lane % 4 * 2};
    if constexpr (!SOFTCAP) options.apply(p, scale_log2);
    cukit::clear(dp);
    const auto do_left = shared_or(q_left, grad_left);
    const auto v_right = shared_or(k_right, grad_right);
    multiply<VALUE_DIM>(
        dp, [&](unsigned(&r)[4], int m, int i) { do_left(r, 16 * m, 16 * i, grad_out_bytes); },
        [&](unsigned(&r)[4], int n, int i) {
          v_right(r, 8 * n, 16 * i, kSameShape ? kKeyBytes : 0);
        });
#if DISTILL
    options.apply(dp, params.teacher_scale_log2);
#endif
#pragma unroll
    for (int m = 0; m < kScoreRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_lse = lse[16 * m + 8 * half];
        const float row_delta = lse[TILE_M + 16 * m + 8 * half];
        const int row = share.score_row + 16 * m + 8 * half + share.lane / 4;
#pragma unroll
        for (int n = 0; n < kScoreCols / 8; ++n) {
          const float* s = &p[m][n][2 * half];
          float slope[2];
          const float low = options.probability(s[0], row_lse, 16 * m + 8 * half, 8 * n,
                                                scale_log2, slope[0]);
          const float high = options.probability(s[1], row_lse, 16 * m + 8 * half, 8 * n + 1,
                                                 scale_log2, slope[1]);
          unsigned char* to = p_bytes +
                              cukit::Swizzle<TILE_N>::offset(row, share.score_col / 8 + n) +
                              share.lane % 4 * 4;
          store_pair(to, low, high, &dp[m][n][2 * half], slope, row_delta, params);
        }
      }
    __syncthreads();  // all of P and dS is in shared memory

    // dV += P^T dO, dQ += dS K, dK += dS^T Q.
    const auto p_left = key_left.rederived();
    const auto q_right = key_right.rederived();
#if !DISTILL
    const auto do_right = shared_or(q_right, value_right);
    multiply<TILE_M>(
        dv, [&](unsigned(&r)[4], int m, int i) { p_left(r, 16 * i, 16 * m); },
        [&](unsigned(&r)[4], int n, int i) { do_right(r, 16 * i, 8 * n, grad_out_bytes); });
#endif
    if constexpr (QUERY_GRADIENT) {
      const long long row = scratch_row(step) + share.query_row;
      const auto ds_query = query_left.rederived();
      const auto k_query = query_right.rederived();
      float* sum = grad_q_sum + cukit::query_block<HEAD_DIM>(row, share.query_col);
#pragma unroll
      for (int pass = 0; pass < QUERY_PASSES; ++pass) {
        const int column = pass * kPassCols;
        QueryGradient dq;
        cukit::clear(dq);
        multiply<TILE_N>(
            dq, [&](unsigned(&r)[4], int m, int i) { ds_query(r, 16 * m, 16 * i); },
            [&](unsigned(&r)[4], int n, int i) { k_query(r, 16 * i, column + 8 * n); });
        add_query_gradient(sum, column, dq, share.lane);
      }
    }
    multiply<TILE_M>(
        dk, [&](unsigned(&r)[4], int m, int i) { p_left(r, 16 * i, 16 * m, kScoreBytes); },
        [&](unsigned(&r)[4], int n, int i) { q_right(r, 16 * i, 8 * n, stage_bytes); });

    if (STAGES == 1 && step + 1 < steps) {
      __syncthreads();
      copy_step(step + 1, 0);
    }
  }

  // Recomputed, to save registers in the loop.
  const cukit::HeadTile again = key_tile_of(cukit::opaque(blockIdx.x), params);
  const cukit::Sequence keys_of =
      cukit::sequence_of(again.head / params.heads, cu_seqlens_q, cu_seqlens_kv, params.seq_q,
                         params.seq_kv);
  const int keys_to_store = keys_of.seq_kv - again.tile * TILE_N;
  const long long first =
      (VARLEN ? keys_of.first_kv
              : static_cast<long long>(again.head / params.heads) * params.seq_kv) +
      again.tile * TILE_N;
  const long long key_stride = params.grad_k_row;
  const long long value_stride = params.grad_v_row;
  grad_k += first * key_stride + again.head % params.heads * params.head_dim;
  if (!DISTILL) grad_v += first * value_stride + again.head % params.heads * params.value_dim;
#if DISTILL
  const float scale = upstream != nullptr ? params.scale * *upstream : params.scale;
#else
  const float scale = params.scale;
#endif
  cukit::cp_async_wait<0>();  // for the copies of K and V, if there was no step
  if (!SPLIT) __syncthreads();  // K and V are no longer read: dK and dV take their place
  store_gradient<HEAD_DIM, PADDED>(grad_k, key_stride, params.head_dim, keys_to_store, shared, dk,
                                   share, share.key_col, scale);
#if !DISTILL
  store_gradient<VALUE_DIM, VALUE_PADDED>(grad_v, value_stride, params.value_dim, keys_to_store,
                                          shared + kKeyBytes, dv, share, share.value_col, 1.0f);
#endif
#if !SPLIT
  __syncthreads();
  cukit::store_tile<TILE_N, HEAD_DIM, THREADS, PADDED>(grad_k, key_stride, shared, 0, keys_to_store,
                                                       params.head_dim, threadIdx.x);
#if !DISTILL
  cukit::store_tile<TILE_N, VALUE_DIM, THREADS, VALUE_PADDED>(
      grad_v, value_stride, shared + kKeyBytes, 0, keys_to_store, params.value_dim, threadIdx.x);
#endif
#endif
}
