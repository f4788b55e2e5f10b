// Gradients of exact attention: dK and dV, and dQ summed up in float32.
//
//   P = exp(scale * Q K^T - lse)      dV = P^T dO      dP = dO V^T
//   dS = P * (dP - delta)             dK = scale * dS^T Q      dQ = scale * dS K
//
// Options of the scores (score_options.cuh) change P as in the forward; dS also takes the slope of a
// softcap.
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
// Mapping: a block owns TILE_N keys of one key head and walks over the queries of `group` query heads
//   in tiles of TILE_M, so that dK and dV are summed in registers in a fixed order. Where key heads
//   alone would leave the GPU half empty, `splits` blocks share a key head, SPLIT is 1 and each writes
//   its own sum in float32 (flash_attention_backward_sum adds them). A block's warps split each of
//   the five products their own way, A x B meaning A warps along the rows: scores (queries x keys)
//   SCORE_WARPS x ..., dK and dV (keys x head_dim) KEY_WARPS x ..., dQ (queries x head_dim)
//   QUERY_WARPS x ... P and dS change hands through shared memory.
//   Without a mask, block n starts at query tile n and wraps around, so that the blocks of a head add
//   to different rows of dQ at any time.
// DISTILL: V and dO are a teacher's keys and queries, delta is its lse. dS is the difference of the two
//   probabilities, dS = P - exp(teacher_scale * dO V^T - delta), and there is no dV. `lse_log2` and
//   `delta` are less the logarithm of a row's weight (attention_kl_backward_prepare).
// Rows of `lse_log2` are +infinity where a query is beyond the last or sees no key: P is then 0.
// Shared memory, bytes: 2 (HEAD_DIM + VALUE_DIM) (TILE_N + STAGES TILE_M) + 4 TILE_M TILE_N
//   + 8 STAGES TILE_M:  K | V | Q stages | dO stages | P | dS | (lse, delta) stages
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than
//   HEAD_DIM; TILE_M, TILE_N; STAGES 1|2; THREADS; SCORE_WARPS, KEY_WARPS, QUERY_WARPS; QUERY_PASSES
//   column parts in which a warp computes its dQ, where registers are short; QUERY_GRADIENT 0|1
//   whether to add to `grad_q_sum`; SPLIT 0|1; BLOCKS_PER_SM; those of score_options.cuh; DISTILL, 0
//   where it is not defined.
// Minimum architecture: sm_80. Accumulates in float. dK and dV are deterministic; dQ is not, since
//   its additions come in any order (flash_attention_backward_query_sm80.cu is).
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
constexpr int kToGradOut = STAGES * kQueryBytes;  // from a tile of Q to that of dO

// Each product's share of a warp: extent in rows and columns.
constexpr int kScoreRows = TILE_M / SCORE_WARPS;
constexpr int kScoreCols = TILE_N / (kWarps / SCORE_WARPS);
constexpr int kKeyRows = TILE_N / KEY_WARPS;
constexpr int kKeyCols = HEAD_DIM / (kWarps / KEY_WARPS);
constexpr int kValueCols = VALUE_DIM / (kWarps / KEY_WARPS);
constexpr int kQueryRows = TILE_M / QUERY_WARPS;
constexpr int kQueryCols = HEAD_DIM / (kWarps / QUERY_WARPS);
constexpr int kPassCols = kQueryCols / QUERY_PASSES;

static_assert(kScoreRows % 16 == 0 && kScoreCols % 16 == 0, "scores: whole 16x16 blocks a warp");
static_assert(kKeyRows % 16 == 0 && kKeyCols % 16 == 0 && kValueCols % 16 == 0,
              "dK, dV: whole 16x16 blocks a warp");
static_assert(kQueryRows % 16 == 0 && kPassCols % 16 == 0, "dQ: whole 16x16 blocks a warp");

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

// Where heads of k and v are alike, tiles of Q and dO (and of K and V) share an operand's register:
// it is told how many bytes further the other tile lies. Otherwise each has its own operand.
constexpr bool kAlike = HEAD_DIM == VALUE_DIM;

template <typename First, typename Second>
CUKIT_DEVICE auto alike_or(const First& first, const Second& second) {
  if constexpr (kAlike) {
    return first;
  } else {
    return second.rederived();
  }
}

// A warp's product of tiles in shared memory over an inner extent of K.
template <int K, int MT, int NT, typename Left, typename Right>
CUKIT_DEVICE void multiply(float (&acc)[MT][NT][4], const Left& left, const Right& right) {
  cukit::warp_product<T, K / 16>(acc, left, right);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_backward_sm80(
    const T* __restrict__ q,         // [batch, seq_q, heads * group, head_dim]
    const T* __restrict__ k,         // [batch, seq_kv, heads / splits, head_dim]
    const T* __restrict__ v,         // [batch, seq_kv, heads / splits, value_dim]
    const T* __restrict__ grad_out,  // [batch, seq_q, heads * group, value_dim]
    const float* __restrict__ lse_log2,  // scratch rows (scratch_rows.cuh)
    const float* __restrict__ delta,     // scratch rows
    float* __restrict__ grad_q_sum,      // scratch rows of HEAD_DIM, zeros at first
    Gradient* __restrict__ grad_k,   // [batch, seq_kv, heads, head_dim], contiguous
    Gradient* __restrict__ grad_v,   // [batch, seq_kv, heads, value_dim], contiguous
    const float* __restrict__ alibi_slopes, const float* __restrict__ sinks,  // ScoreArrays
    const cukit::bias_t* __restrict__ bias, const unsigned char* __restrict__ mask,
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
#if DISTILL
    const float* __restrict__ upstream,  // scalar or null: a factor of dK
#endif
    const __grid_constant__ cukit::KeyGradientParameters arrays) {
  const cukit::MappedKeyParameters& params = arrays.work;
  const cukit::ScoreSettings& settings = params.settings;
  const float scale_log2 = params.scale_log2;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned k_tile = cukit::shared_address(shared);
  const unsigned v_tile = k_tile + kKeyBytes;
  const unsigned q_tile = v_tile + kValueBytes;
  const unsigned grad_out_tile = q_tile + kToGradOut;
  const unsigned p_tile = grad_out_tile + STAGES * kGradOutBytes;
  const unsigned ds_tile = p_tile + kScoreBytes;
  unsigned char* const p_bytes = shared + (p_tile - k_tile);
  float* const statistics = reinterpret_cast<float*>(p_bytes + 2 * kScoreBytes);
  const unsigned statistics_at = ds_tile + kScoreBytes;

  const int heads_q = params.heads * params.group;
  const auto work_of = [&](int block) {
    const int key_tiles = (params.seq_kv + TILE_N - 1) / TILE_N;
    return cukit::head_tile(block, params.batch * params.heads, key_tiles, params.section);
  };
  const cukit::HeadTile work = work_of(blockIdx.x);
  const int b = work.head / params.heads;
  const int key_head = work.head % params.heads;  // splits of these share a head of k and v
  const cukit::Sequence sequence =
      cukit::sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv);
  const int first_key = work.tile * TILE_N;
  const int keys_left = sequence.seq_kv - first_key;
  if (VARLEN && keys_left <= 0) return;
  const int seq_q = sequence.seq_q;
  const int causal_offset = sequence.seq_kv - seq_q;
  const cukit::TileRange tiles =
      cukit::query_tiles<TILE_M>(first_key, min(TILE_N, keys_left), causal_offset, seq_q, settings);
  const int tiles_per_head = tiles.end - tiles.begin;
  const int steps = tiles_per_head * params.group;
  const int turn = CAUSAL || WINDOW || tiles.end == 0 ? 0 : work.tile % tiles.end;

  q += cukit::offset_of(arrays.q, b, sequence.first_q, key_head * params.group);
  grad_out += cukit::offset_of(arrays.grad_out, b, sequence.first_q, key_head * params.group);
  k += cukit::offset_of(arrays.k, b, sequence.first_kv + first_key, key_head / params.splits);
#if DISTILL
  const int value_head = key_head * params.group / params.teacher_group;
#else
  const int value_head = key_head / params.splits;
#endif
  v += cukit::offset_of(arrays.v, b, sequence.first_kv + first_key, value_head);

  const auto head_of = [&](int step) { return step / tiles_per_head; };
  const auto tile_of = [&](int step) {
    const int tile = tiles.begin + step % tiles_per_head + turn;
    return tile < tiles.end ? tile : tile - tiles_per_head;
  };
  const auto scratch_row = [&](int step) {
    return cukit::scratch_row(b, key_head * params.group + head_of(step), heads_q,
                              params.rows_per_head, sequence.first_q) +
           tile_of(step) * TILE_M;
  };
  const auto copy_queries = [&](int step, int stage) {
    const int head = head_of(step);
    const int row = tile_of(step) * TILE_M;
    QueryCopy::start(q_tile + stage * kQueryBytes,
                     q + cukit::offset_of(arrays.q, 0, row, head), arrays.q.row, seq_q - row,
                     params.head_dim);
    GradOutCopy::start(grad_out_tile + stage * kGradOutBytes,
                       grad_out + cukit::offset_of(arrays.grad_out, 0, row, head),
                       arrays.grad_out.row, seq_q - row, params.value_dim);
    const int chunk = threadIdx.x;
    if (chunk < TILE_M / 2) {
      const float* from = chunk < TILE_M / 4 ? lse_log2 : delta;
      cukit::cp_async_16(statistics_at + (stage * TILE_M / 2 + chunk) * 16,
                         from + scratch_row(step) + chunk % (TILE_M / 4) * 4);
    }
    cukit::cp_async_commit();
  };

  KeyCopy::start(k_tile, k, arrays.k.row, keys_left, params.head_dim);
  ValueCopy::start(v_tile, v, arrays.v.row, keys_left, params.value_dim);
  if (steps > 0) copy_queries(0, 0);
  cukit::cp_async_commit();

  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int score_row = warp % SCORE_WARPS * kScoreRows;
  const int score_col = warp / SCORE_WARPS * kScoreCols;
  const int key_row = warp % KEY_WARPS * kKeyRows;
  const int key_col = warp / KEY_WARPS * kKeyCols;
  const int value_col = warp / KEY_WARPS * kValueCols;
  const int query_row = warp % QUERY_WARPS * kQueryRows;
  const int query_col = warp / QUERY_WARPS * kQueryCols;

  // Queries as rows, keys as columns: S and dP.
  const cukit::LeftMK<HEAD_DIM> score_left(q_tile, score_row, 0);
  const cukit::RightNK<HEAD_DIM> score_right(k_tile, score_col, 0);
  const cukit::LeftMK<VALUE_DIM> grad_left(grad_out_tile, score_row, 0);
  const cukit::RightNK<VALUE_DIM> grad_right(v_tile, score_col, 0);
  // Keys as rows, head_dim as columns: dK and dV; dS lies one tile behind P.
  const cukit::LeftKM<TILE_N, kKeyRows> key_left(p_tile, 0, key_row);
  const cukit::RightKN<HEAD_DIM, kKeyCols> key_right(q_tile, 0, key_col);
  const cukit::RightKN<VALUE_DIM, kValueCols> value_right(grad_out_tile, 0, value_col);
  // Queries as rows, head_dim as columns: dQ.
  const cukit::LeftMK<TILE_N> query_left(ds_tile, query_row, 0);
  const cukit::RightKN<HEAD_DIM, kQueryCols> query_right(k_tile, 0, query_col);

  KeyGradient dk;
  cukit::clear(dk);
#if !DISTILL
  ValueGradient dv;
  cukit::clear(dv);
#endif

  for (int step = 0; step < steps; ++step) {
    const int stage = STAGES == 2 ? step % 2 : 0;
    const int stage_bytes = stage * kQueryBytes;
    const int grad_out_bytes = kAlike ? stage_bytes + kToGradOut : stage * kGradOutBytes;
    cukit::cp_async_wait<0>();
    __syncthreads();  // this step's queries have landed, and everybody is done with the step before
    if (STAGES == 2 && step + 1 < steps) copy_queries(step + 1, stage ^ 1);

    const int tile = tile_of(step);
    const float* lse_of = statistics + stage * 2 * TILE_M + score_row + lane / 4;

    const auto q_left = score_left.rederived();
    const auto k_right = score_right.rederived();

    Scores p, dp;
    cukit::clear(p);
    multiply<HEAD_DIM>(
        p, [&](unsigned(&r)[4], int m, int i) { q_left(r, 16 * m, 16 * i, stage_bytes); },
        [&](unsigned(&r)[4], int n, int i) { k_right(r, 8 * n, 16 * i); });
    const cukit::HeadScores options({alibi_slopes, sinks, bias, mask}, settings, b,
                                    key_head * params.group + head_of(step), sequence);
    const bool unmasked = keys_left >= TILE_N && tiles.unmasked(tile);
    const int lane_query = tile * TILE_M + score_row + lane / 4;
    const int lane_key = first_key + score_col + lane % 4 * 2;
    if constexpr (!SOFTCAP) {
#pragma unroll
      for (int m = 0; m < kScoreRows / 16; ++m) {
        cukit::apply_options(cukit::flat(p[m]), {lane_query + 16 * m, lane_key}, options,
                             scale_log2, settings, unmasked, keys_left < TILE_N);
      }
    }
    cukit::clear(dp);
    const auto do_left = alike_or(q_left, grad_left);
    const auto v_right = alike_or(k_right, grad_right);
    multiply<VALUE_DIM>(
        dp, [&](unsigned(&r)[4], int m, int i) { do_left(r, 16 * m, 16 * i, grad_out_bytes); },
        [&](unsigned(&r)[4], int n, int i) { v_right(r, 8 * n, 16 * i, kAlike ? kKeyBytes : 0); });
#if DISTILL
#pragma unroll
    for (int m = 0; m < kScoreRows / 16; ++m) {
      cukit::apply_options(cukit::flat(dp[m]), {lane_query + 16 * m, lane_key}, options,
                           params.teacher_scale_log2, settings, unmasked, keys_left < TILE_N);
    }
#endif
    // The probability of a score. A softcap's derivative, `slope`, is only known with the product.
    const auto probability = [&](float score, float row_lse, int row, int column, float& slope) {
      if constexpr (SOFTCAP) {
        const int query = lane_query + row, key = lane_key + column;
        const float value = options.score(score, query, key, scale_log2, settings, slope);
        const cukit::Span seen = cukit::visible_keys(query, causal_offset, sequence.seq_kv, settings);
        const bool hidden = !unmasked && options.hidden(seen, query, key, settings);
        return hidden ? 0.0f : exp2f(value - row_lse);
      } else {
        slope = 1.0f;
        return exp2f(fmaf(score, cukit::exponent_factor(scale_log2), -row_lse));
      }
    };
#pragma unroll
    for (int m = 0; m < kScoreRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_lse = lse_of[16 * m + 8 * half];
        const float row_delta = lse_of[TILE_M + 16 * m + 8 * half];
        const int row = score_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
        for (int n = 0; n < kScoreCols / 8; ++n) {
          const float* s = &p[m][n][2 * half];
          const float* g = &dp[m][n][2 * half];
          float slope[2];
          const float low = probability(s[0], row_lse, 16 * m + 8 * half, 8 * n, slope[0]);
          const float high = probability(s[1], row_lse, 16 * m + 8 * half, 8 * n + 1, slope[1]);
          unsigned char* to =
              p_bytes + cukit::Swizzle<TILE_N>::offset(row, score_col / 8 + n) + lane % 4 * 4;
#if DISTILL
          *reinterpret_cast<unsigned*>(to + kScoreBytes) =
              cukit::pack<T>(low - exp2f(fmaf(g[0], params.teacher_scale_log2, -row_delta)),
                             high - exp2f(fmaf(g[1], params.teacher_scale_log2, -row_delta)));
#else
          *reinterpret_cast<unsigned*>(to) = cukit::pack<T>(low, high);
          *reinterpret_cast<unsigned*>(to + kScoreBytes) = cukit::pack<T>(
              low * (g[0] - row_delta) * slope[0], high * (g[1] - row_delta) * slope[1]);
#endif
        }
      }
    __syncthreads();  // P and dS are whole

    const auto p_left = key_left.rederived();
    const auto q_right = key_right.rederived();
#if !DISTILL
    const auto do_right = alike_or(q_right, value_right);
    multiply<TILE_M>(
        dv, [&](unsigned(&r)[4], int m, int i) { p_left(r, 16 * i, 16 * m); },
        [&](unsigned(&r)[4], int n, int i) { do_right(r, 16 * i, 8 * n, grad_out_bytes); });
#endif
    if constexpr (QUERY_GRADIENT) {
      const long long row = scratch_row(step) + query_row;
      const auto ds_query = query_left.rederived();
      const auto k_query = query_right.rederived();
      float* sum = grad_q_sum + cukit::query_block<HEAD_DIM>(row, query_col);
#pragma unroll
      for (int pass = 0; pass < QUERY_PASSES; ++pass) {
        const int column = pass * kPassCols;
        QueryGradient dq;
        cukit::clear(dq);
        multiply<TILE_N>(
            dq, [&](unsigned(&r)[4], int m, int i) { ds_query(r, 16 * m, 16 * i); },
            [&](unsigned(&r)[4], int n, int i) { k_query(r, 16 * i, column + 8 * n); });
#pragma unroll
        for (int m = 0; m < kQueryRows / 16; ++m)
#pragma unroll
          for (int n = 0; n < kPassCols / 8; ++n) {
            cukit::add_to_query_block(sum + cukit::query_block<HEAD_DIM>(16 * m, column + 8 * n),
                                      lane, dq[m][n]);
          }
      }
    }
    multiply<TILE_M>(
        dk, [&](unsigned(&r)[4], int m, int i) { p_left(r, 16 * i, 16 * m, kScoreBytes); },
        [&](unsigned(&r)[4], int n, int i) { q_right(r, 16 * i, 8 * n, stage_bytes); });

    if (STAGES == 1 && step + 1 < steps) {
      __syncthreads();
      copy_queries(step + 1, 0);
    }
  }

  const cukit::HeadTile again = work_of(cukit::opaque(blockIdx.x));
  const cukit::Sequence keys_of =
      cukit::sequence_of(again.head / params.heads, cu_seqlens_q, cu_seqlens_kv, params.seq_q,
                         params.seq_kv);
  const int keys_to_store = keys_of.seq_kv - again.tile * TILE_N;
  const long long first =
      (VARLEN ? keys_of.first_kv
              : static_cast<long long>(again.head / params.heads) * params.seq_kv) +
      again.tile * TILE_N;
  const long long key_stride = static_cast<long long>(params.heads) * params.head_dim;
  const long long value_stride = static_cast<long long>(params.heads) * params.value_dim;
  grad_k += first * key_stride + again.head % params.heads * params.head_dim;
  if (!DISTILL) grad_v += first * value_stride + again.head % params.heads * params.value_dim;
#if DISTILL
  const float scale = upstream != nullptr ? params.scale * *upstream : params.scale;
#else
  const float scale = params.scale;
#endif
  cukit::cp_async_wait<0>();  // without a step, nobody has waited for K and V
  const auto each_pair = [&](const auto& gradient, int first_col, auto store) {
#pragma unroll
    for (int m = 0; m < kKeyRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < static_cast<int>(sizeof(gradient[0]) / sizeof(gradient[0][0])); ++n) {
          const int row = key_row + 16 * m + 8 * half + lane / 4;
          const float* pair = &gradient[m][n][2 * half];
          store(row, first_col + 8 * n, pair[0], pair[1]);
        }
  };
#if SPLIT
  each_pair(dk, key_col, [&](int row, int column, float low, float high) {
    column += lane % 4 * 2;
    if (row >= keys_to_store || (PADDED && column >= params.head_dim)) return;
    *reinterpret_cast<float2*>(grad_k + row * key_stride + column) =
        make_float2(low * scale, high * scale);
  });
#if !DISTILL
  each_pair(dv, value_col, [&](int row, int column, float low, float high) {
    column += lane % 4 * 2;
    if (row >= keys_to_store || (VALUE_PADDED && column >= params.value_dim)) return;
    *reinterpret_cast<float2*>(grad_v + row * value_stride + column) = make_float2(low, high);
  });
#endif
#else
  __syncthreads();  // K and V are no longer read: their room takes dK and dV
  each_pair(dk, key_col, [&](int row, int column, float low, float high) {
    const unsigned at = cukit::Swizzle<HEAD_DIM>::offset(row, column / 8) + lane % 4 * 4;
    *reinterpret_cast<unsigned*>(shared + at) =
        cukit::pack<T>(low * scale, high * scale);
  });
#if !DISTILL
  each_pair(dv, value_col, [&](int row, int column, float low, float high) {
    const unsigned at = cukit::Swizzle<VALUE_DIM>::offset(row, column / 8) + lane % 4 * 4;
    *reinterpret_cast<unsigned*>(shared + kKeyBytes + at) = cukit::pack<T>(low, high);
  });
#endif
  __syncthreads();
  cukit::store_tile<TILE_N, HEAD_DIM, THREADS, PADDED>(grad_k, key_stride, shared, 0, keys_to_store,
                                                       params.head_dim, threadIdx.x);
#if !DISTILL
  cukit::store_tile<TILE_N, VALUE_DIM, THREADS, VALUE_PADDED>(
      grad_v, value_stride, shared + kKeyBytes, 0, keys_to_store, params.value_dim, threadIdx.x);
#endif
#endif
}
