// Gradients of exact attention: dK and dV, and dQ summed up in float32.
//
//   P = exp(scale * Q K^T - lse)      dV = P^T dO      dP = dO V^T
//   dS = P * (dP - delta)             dK = scale * dS^T Q      dQ = scale * dS K
//
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
// Mapping: a block owns TILE_N keys of one key head and walks over the queries of `group` query heads
//   in tiles of TILE_M, so that dK and dV are summed in registers in a fixed order. Where key heads
//   alone would leave the GPU half empty, `splits` blocks share a key head, SPLIT is 1 and each writes
//   its own sum in float32 (flash_attention_backward_sum adds them). A block's warps split each of the five products their own way, A x B meaning A warps along the rows:
//   scores (queries x keys) SCORE_WARPS x ..., dK and dV (keys x head_dim) KEY_WARPS x ..., dQ
//   (queries x head_dim) QUERY_WARPS x ... P and dS change hands through shared memory.
//   Without a mask, block n starts at query tile n and wraps around, so that the blocks of a head add
//   to different rows of dQ at any time.
// Rows of `lse_log2` are +infinity where a query is beyond the last or sees no key: P is then 0.
// Shared memory, bytes: 2 HEAD_DIM (2 TILE_N + 2 STAGES TILE_M) + 4 TILE_M TILE_N + 8 STAGES TILE_M:
//   K | V | Q stages | dO stages | P | dS | (lse, delta) stages
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than
//   HEAD_DIM; TILE_M, TILE_N; STAGES 1|2; THREADS; SCORE_WARPS, KEY_WARPS, QUERY_WARPS; QUERY_PASSES
//   column parts in which a warp computes its dQ, where registers are short; CAUSAL 0|1;
//   QUERY_GRADIENT 0|1 whether to add to `grad_q_sum`; SPLIT 0|1; BLOCKS_PER_SM.
// Minimum architecture: sm_80. Accumulates in float. dK and dV are deterministic; dQ is not, since
//   its additions come in any order (flash_attention_backward_query_sm80.cu is).
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "attention/query_gradient.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kWarps = THREADS / cukit::kWarpSize;
constexpr int kTileBytesM = TILE_M * HEAD_DIM * 2;
constexpr int kTileBytesN = TILE_N * HEAD_DIM * 2;
constexpr int kScoreBytes = TILE_M * TILE_N * 2;
constexpr int kToGradOut = STAGES * kTileBytesM;  // from a tile of Q to that of dO

// Each product's share of a warp: extent in rows and columns.
constexpr int kScoreRows = TILE_M / SCORE_WARPS;
constexpr int kScoreCols = TILE_N / (kWarps / SCORE_WARPS);
constexpr int kKeyRows = TILE_N / KEY_WARPS;
constexpr int kKeyCols = HEAD_DIM / (kWarps / KEY_WARPS);
constexpr int kQueryRows = TILE_M / QUERY_WARPS;
constexpr int kQueryCols = HEAD_DIM / (kWarps / QUERY_WARPS);
constexpr int kPassCols = kQueryCols / QUERY_PASSES;

static_assert(kScoreRows % 16 == 0 && kScoreCols % 16 == 0, "scores: whole 16x16 blocks a warp");
static_assert(kKeyRows % 16 == 0 && kKeyCols % 16 == 0, "dK, dV: whole 16x16 blocks a warp");
static_assert(kQueryRows % 16 == 0 && kPassCols % 16 == 0, "dQ: whole 16x16 blocks a warp");

using QueryCopy = cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
using KeyCopy = cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;

#if SPLIT
using Gradient = float;
#else
using Gradient = T;
#endif

using Scores = float[kScoreRows / 16][kScoreCols / 8][4];
using KeyGradient = float[kKeyRows / 16][kKeyCols / 8][4];
using QueryGradient = float[kQueryRows / 16][kPassCols / 8][4];

// A warp's product of tiles in shared memory over an inner extent of K.
template <int K, int MT, int NT, typename Left, typename Right>
CUKIT_DEVICE void multiply(float (&acc)[MT][NT][4], const Left& left, const Right& right) {
  cukit::warp_product<T, K / 16>(acc, left, right);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_backward_sm80(
    const T* __restrict__ q,         // [batch, seq_q, heads * group, head_dim]
    const T* __restrict__ k,         // [batch, seq_kv, heads / splits, head_dim]
    const T* __restrict__ v,         // as k
    const T* __restrict__ grad_out,  // as q
    const float* __restrict__ lse_log2,  // [batch * heads * group, seq_q_padded]
    const float* __restrict__ delta,     // as lse_log2
    float* __restrict__ grad_q_sum,  // [batch * heads * group, seq_q_padded, HEAD_DIM], zeros at first
    Gradient* __restrict__ grad_k,   // [batch, seq_kv, heads, head_dim], contiguous
    Gradient* __restrict__ grad_v,   // as grad_k
    long long q_batch, long long q_row, long long q_head,  // strides in elements
    long long k_batch, long long k_row, long long k_head,
    long long v_batch, long long v_row, long long v_head,
    long long grad_out_batch, long long grad_out_row, long long grad_out_head,
    int batch, int heads, int group, int splits, int seq_q, int seq_kv, int seq_q_padded,
    int head_dim, int section, float scale, float scale_log2) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned k_tile = cukit::shared_address(shared);
  const unsigned v_tile = k_tile + kTileBytesN;
  const unsigned q_tile = v_tile + kTileBytesN;
  const unsigned grad_out_tile = q_tile + kToGradOut;
  const unsigned p_tile = grad_out_tile + kToGradOut;
  const unsigned ds_tile = p_tile + kScoreBytes;
  unsigned char* const p_bytes = shared + (p_tile - k_tile);
  float* const statistics = reinterpret_cast<float*>(p_bytes + 2 * kScoreBytes);
  const unsigned statistics_at = ds_tile + kScoreBytes;

  const int kv_tiles = (seq_kv + TILE_N - 1) / TILE_N;
  const int q_tiles = seq_q_padded / TILE_M;
  const auto work_of = [&](int block) {
    return cukit::head_tile(block, batch * heads, kv_tiles, section);
  };
  const cukit::HeadTile work = work_of(blockIdx.x);
  const int b = work.head / heads;
  const int key_head = work.head % heads;  // splits of these share a head of k and v
  const int first_key = work.tile * TILE_N;
  const int keys_left = seq_kv - first_key;
  const int past = seq_kv - seq_q;  // query i sees keys up to i + past
  const int first_q_tile = CAUSAL ? min(q_tiles, max(0, first_key - past) / TILE_M) : 0;
  const int tiles_per_head = q_tiles - first_q_tile;
  const int steps = tiles_per_head * group;
  const int turn = CAUSAL || q_tiles == 0 ? 0 : work.tile % q_tiles;

  q += b * q_batch + key_head * group * q_head;
  grad_out += b * grad_out_batch + key_head * group * grad_out_head;
  k += b * k_batch + key_head / splits * k_head + first_key * k_row;
  v += b * v_batch + key_head / splits * v_head + first_key * v_row;

  const auto head_of = [&](int step) { return step / tiles_per_head; };
  const auto tile_of = [&](int step) {
    const int tile = first_q_tile + step % tiles_per_head + turn;
    return tile < q_tiles ? tile : tile - tiles_per_head;
  };
  const auto copy_queries = [&](int step, int stage) {
    const int head = head_of(step);
    const int row = tile_of(step) * TILE_M;
    QueryCopy::start(q_tile + stage * kTileBytesM,
                     q + head * q_head + row * q_row, q_row, seq_q - row, head_dim);
    QueryCopy::start(grad_out_tile + stage * kTileBytesM,
                     grad_out + head * grad_out_head + row * grad_out_row, grad_out_row,
                     seq_q - row, head_dim);
    const int chunk = threadIdx.x;
    if (chunk < TILE_M / 2) {
      const float* from = chunk < TILE_M / 4 ? lse_log2 : delta;
      const long long head_row =
          static_cast<long long>(work.head * group + head) * seq_q_padded + row;
      cukit::cp_async_16(statistics_at + (stage * TILE_M / 2 + chunk) * 16,
                         from + head_row + chunk % (TILE_M / 4) * 4);
    }
    cukit::cp_async_commit();
  };

  KeyCopy::start(k_tile, k, k_row, keys_left, head_dim);
  KeyCopy::start(v_tile, v, v_row, keys_left, head_dim);
  if (steps > 0) copy_queries(0, 0);
  cukit::cp_async_commit();

  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int score_row = warp % SCORE_WARPS * kScoreRows;
  const int score_col = warp / SCORE_WARPS * kScoreCols;
  const int key_row = warp % KEY_WARPS * kKeyRows;
  const int key_col = warp / KEY_WARPS * kKeyCols;
  const int query_row = warp % QUERY_WARPS * kQueryRows;
  const int query_col = warp / QUERY_WARPS * kQueryCols;

  // Queries as rows, keys as columns: S and, one tile further, dP.
  const cukit::LeftMK<HEAD_DIM> score_left(q_tile, score_row, 0);
  const cukit::RightNK<HEAD_DIM> score_right(k_tile, score_col, 0);
  // Keys as rows, head_dim as columns: dK and, one tile away, dV.
  const cukit::LeftKM<TILE_N, kKeyRows> key_left(p_tile, 0, key_row);
  const cukit::RightKN<HEAD_DIM, kKeyCols> key_right(q_tile, 0, key_col);
  // Queries as rows, head_dim as columns: dQ.
  const cukit::LeftMK<TILE_N> query_left(ds_tile, query_row, 0);
  const cukit::RightKN<HEAD_DIM, kQueryCols> query_right(k_tile, 0, query_col);

  KeyGradient dk, dv;
  cukit::clear(dk);
  cukit::clear(dv);

  for (int step = 0; step < steps; ++step) {
    const int stage = STAGES == 2 ? step % 2 : 0;
    const int stage_bytes = stage * kTileBytesM;
    cukit::cp_async_wait<0>();
    __syncthreads();  // this step's queries have landed, and everybody is done with the step before
    if (STAGES == 2 && step + 1 < steps) copy_queries(step + 1, stage ^ 1);

    const int first_query = tile_of(step) * TILE_M;
    const float* lse_of = statistics + stage * 2 * TILE_M + score_row + lane / 4;

    const auto q_left = score_left.rederived();
    const auto k_right = score_right.rederived();

    Scores p, dp;
    cukit::clear(p);
    multiply<HEAD_DIM>(
        p, [&](unsigned(&r)[4], int m, int i) { q_left(r, 16 * m, 16 * i, stage_bytes); },
        [&](unsigned(&r)[4], int n, int i) { k_right(r, 8 * n, 16 * i); });
    if (keys_left < TILE_N || (CAUSAL && first_key + TILE_N - 1 > first_query + past)) {
#pragma unroll
      for (int m = 0; m < kScoreRows / 16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = score_row + 16 * m + i / 2 * 8 + lane / 4;
          const int seen = first_query + row + past + 1 - first_key;
          const int end = CAUSAL ? min(keys_left, seen) : keys_left;
#pragma unroll
          for (int n = 0; n < kScoreCols / 8; ++n) {
            if (score_col + 8 * n + lane % 4 * 2 + i % 2 >= end) p[m][n][i] = -cukit::infinity();
          }
        }
    }
    cukit::clear(dp);
    multiply<HEAD_DIM>(
        dp, [&](unsigned(&r)[4], int m, int i) { q_left(r, 16 * m, 16 * i, stage_bytes + kToGradOut); },
        [&](unsigned(&r)[4], int n, int i) { k_right(r, 8 * n, 16 * i, kTileBytesN); });
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
          const float low = exp2f(fmaf(s[0], scale_log2, -row_lse));
          const float high = exp2f(fmaf(s[1], scale_log2, -row_lse));
          unsigned char* to =
              p_bytes + cukit::Swizzle<TILE_N>::offset(row, score_col / 8 + n) + lane % 4 * 4;
          *reinterpret_cast<unsigned*>(to) = cukit::pack<T>(low, high);
          *reinterpret_cast<unsigned*>(to + kScoreBytes) =
              cukit::pack<T>(low * (g[0] - row_delta), high * (g[1] - row_delta));
        }
      }
    __syncthreads();  // P and dS are whole

    const auto p_left = key_left.rederived();
    const auto q_right = key_right.rederived();
    multiply<TILE_M>(
        dv, [&](unsigned(&r)[4], int m, int i) { p_left(r, 16 * i, 16 * m); },
        [&](unsigned(&r)[4], int n, int i) { q_right(r, 16 * i, 8 * n, stage_bytes + kToGradOut); });
    if constexpr (QUERY_GRADIENT) {
      const long long row =
          static_cast<long long>(work.head * group + head_of(step)) * seq_q_padded + first_query +
          query_row;
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
  const int keys_to_store = seq_kv - again.tile * TILE_N;
  const long long row_stride = static_cast<long long>(heads) * head_dim;
  const long long first = static_cast<long long>(again.head / heads) * seq_kv + again.tile * TILE_N;
  const long long start = first * row_stride + again.head % heads * head_dim;
  grad_k += start;
  grad_v += start;
  cukit::cp_async_wait<0>();  // without a step, nobody has waited for K and V
#if SPLIT
#pragma unroll
  for (int m = 0; m < kKeyRows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kKeyCols / 8; ++n) {
        const int row = key_row + 16 * m + 8 * half + lane / 4;
        const int column = key_col + 8 * n + lane % 4 * 2;
        if (row >= keys_to_store || (PADDED && column >= head_dim)) continue;
        const long long at = row * row_stride + column;
        const float* k_pair = &dk[m][n][2 * half];
        const float* v_pair = &dv[m][n][2 * half];
        *reinterpret_cast<float2*>(grad_k + at) = make_float2(k_pair[0] * scale, k_pair[1] * scale);
        *reinterpret_cast<float2*>(grad_v + at) = make_float2(v_pair[0], v_pair[1]);
      }
#else
  __syncthreads();  // K and V are no longer read: their room takes dK and dV
#pragma unroll
  for (int m = 0; m < kKeyRows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kKeyCols / 8; ++n) {
        const int row = key_row + 16 * m + 8 * half + lane / 4;
        unsigned char* to =
            shared + cukit::Swizzle<HEAD_DIM>::offset(row, key_col / 8 + n) + lane % 4 * 4;
        const float* k_pair = &dk[m][n][2 * half];
        const float* v_pair = &dv[m][n][2 * half];
        *reinterpret_cast<unsigned*>(to) = cukit::pack<T>(k_pair[0] * scale, k_pair[1] * scale);
        *reinterpret_cast<unsigned*>(to + kTileBytesN) = cukit::pack<T>(v_pair[0], v_pair[1]);
      }
  __syncthreads();
  cukit::store_tile<TILE_N, HEAD_DIM, THREADS, PADDED>(grad_k, row_stride, shared, 0, keys_to_store,
                                                       head_dim, threadIdx.x);
  cukit::store_tile<TILE_N, HEAD_DIM, THREADS, PADDED>(grad_v, row_stride, shared + kTileBytesN, 0,
                                                       keys_to_store, head_dim, threadIdx.x);
#endif
}
