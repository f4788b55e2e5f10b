// Gradients of a gated linear recurrence, chunk by chunk from the last to the first on tensor cores.
//
//   h_t = exp(l_t) h_{t-1} + b_t x_t^T      y_t = h_t^T c_t      l_t <= 0, one per head
//
// With e_ij = exp(s_i - s_j), s_i the sum of a chunk's log decays l up to token i, h the state
// before the chunk, g and g' the gradients of the states after and before the chunk, and d_i the
// gradient of y_i:
//   dx_j = sum_{i >= j} e_ij (c_i . b_j) d_i + exp(s_last - s_j) g^T b_j
//   db_j = sum_{i >= j} e_ij (d_i . x_j) c_i + exp(s_last - s_j) g x_j
//   dc_i = sum_{j <= i} e_ij (d_i . x_j) b_j + exp(s_i) h d_i
//   dl_t = sum_{i >= t > j} e_ij (c_i . b_j) (d_i . x_j) + sum_{i >= t} exp(s_i) c_i . h d_i
//        + sum_{j < t} exp(s_last - s_j) b_j . g x_j + exp(s_last) <g, h>
//   g'   = exp(s_last) g + sum_i exp(s_i) c_i d_i^T
// The first sum of dl is a prefix sum of column sums minus row sums of one float matrix. Unlike
// differences of y . d and x . dx, it leaves no rounding residue of decayed terms. dl is 0 where l
// is clamped, outside [-104, 0].
// Papers: Dao and Gu, arXiv:2405.21060; Yang et al., arXiv:2312.06635.
//
// Mapping: grid (segment, column tile, sequence * heads + head of the launch); a block of four
//   warps iterates over the chunks of 64 tokens of its segment, from the last to the first. g stays
//   in registers as floats, a quarter of its rows per warp, and is rounded to the type of the
//   inputs for the products that read it; h is read, rounded, from the output of gated_scan_sm80.cu
//   or gated_scan_sm90.cu with STATES 2. Scores: six of the eight 16 x 32 tiles are not fully
//   masked. db and dc: 2 x 2 warps. The heads of a group and the column tiles write partial db, dc
//   and dl, which sum_parts.cu reduces.
// Shared memory, dynamic, all of 2 bytes: STAGES x (queries and keys, 64 x STATE_TILE each; values
//   and gradients of outputs, 64 x 64 each; STATE_TILE x 64 state), STATE_TILE x 64 of g, two tiles
//   64 x 64 of scores. Static: 11 x 64 + 4 floats.
// CHANNELS: a decay per row of the state. gated_scan_channels.cu has already decayed queries, keys
//   and scores; only g is decayed here. Besides dx and the gradient of the initial state, the
//   results are d_i . x_j, h d_i, g x_j and <g, h> per row of the state, from which
//   gated_scan_channels_backward.cu computes dc, db and the gradients of the decays.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; CHANNELS 0|1; STAGES 1|2; PADDED 0|1:
//   state_dim or head_dim is not a multiple of its tile (both are multiples of 8); THREADS 128.
//   Minimum architecture: sm_80. Accumulates in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_backward.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "sequence/chunks.cuh"
#include "sequence/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::kChunk;
using cukit::kWarpSize;

constexpr int kColumns = cukit::kHeadColumns;
constexpr int kWarps = THREADS / kWarpSize;
constexpr int kKeyBytes = kChunk * STATE_TILE * 2;
constexpr int kValueBytes = kChunk * kColumns * 2;
constexpr int kStateBytes = STATE_TILE * kColumns * 2;
constexpr int kScoreBytes = kChunk * kChunk * 2;
constexpr int kKeys = 0, kQueries = kKeyBytes, kValues = 2 * kKeyBytes;
constexpr int kGrads = kValues + kValueBytes, kState = kGrads + kValueBytes;
constexpr int kStageBytes = kState + kStateBytes;
static_assert(kWarps == 4 && kChunk == 64, "2 x 2 warps over a chunk's rows and columns");

using Rows = cukit::StateRows<STATE_TILE>;
using Decay = cukit::StateDecay<Rows, CHANNELS>;
using StateValues = float[Rows::kTiles][Rows::kColumnTiles][4];
using Scores = cukit::Swizzle<kChunk>;

// Sums of a chunk's products per token, and <g, h>: the terms of the gradients of the decays.
struct Sums {
  float rows[2][kChunk];     // row sums of scores, per column tile
  float columns[4][kChunk];  // column sums of scores, per row tile
  float read[2][kChunk];     // c . h d, per half of the states
  float written[2][kChunk];  // b . g x
  float passing[kWarps];     // <g, h>
};

// Loads two adjacent elements of a tile.
template <int Cols>
CUKIT_DEVICE void pair_at(float (&to)[2], const unsigned char* tile, int row, int column) {
  const unsigned at = cukit::Swizzle<Cols>::offset(row, column / 8) + 2 * (column % 8);
  cukit::unpack<T>(to, *reinterpret_cast<const unsigned*>(tile + at));
}

// Scales rows of accumulators by factor(row); `first_row` is the first row of the warp.
template <int MT, int NT, typename Factor>
CUKIT_DEVICE void scale_rows(float (&acc)[MT][NT][4], int first_row, const Factor& factor) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = factor(first_row + 16 * m + 8 * half + static_cast<int>(threadIdx.x % kWarpSize) / 4);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        acc[m][n][2 * half] *= by;
        acc[m][n][2 * half + 1] *= by;
      }
    }
}

// Stores the dot product of each of a warp's rows of accumulators with the row of a tile in
// to[row]; `more`: adds to it instead.
template <int MT, int NT>
CUKIT_DEVICE void dot_rows(float* to, bool more, const float (&acc)[MT][NT][4], const unsigned char* tile,
                           int first_row, int first_column) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float pair[2];
        pair_at<STATE_TILE>(pair, tile, row, first_column + 8 * n + 2 * (lane % 4));
        sum = fmaf(acc[m][n][2 * half], pair[0], sum);
        sum = fmaf(acc[m][n][2 * half + 1], pair[1], sum);
      }
      sum = cukit::warp_reduce<cukit::Sum, 4>(sum);
      if (lane % 4 == 0) to[row] = more ? to[row] + sum : sum;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_scan_backward(
    const T* __restrict__ grad_y,         // [tokens, num_heads, head_dim]
    const T* __restrict__ x,              // [tokens, num_heads, head_dim]
    const T* __restrict__ b,              // [tokens, num_groups, state_dim]
    const T* __restrict__ c,              // [tokens, num_groups, state_dim]
    const float* __restrict__ log_decay,  // [tokens, num_heads]; with CHANNELS each chunk's sum, base 2,
                                          // [slots, heads, state_dim]
    const int* __restrict__ cu_seqlens,   // [num_sequences + 1] or null: seq_len each
    const T* chunk_states,                // [slots, heads, state_dim, head_dim], before each chunk
    const T* __restrict__ scores,           // [slots, heads, 64, 64], decayed, with CHANNELS
    const float* grad_states,               // gradients of the states after each segment, or null:
                                            // [.., state_dim, head_dim], indexed by ScanWork::place
    T* __restrict__ grad_x,                 // [tokens, num_heads, head_dim]
    T* __restrict__ grad_b,                 // [tokens, heads, column tiles, state_dim]
    T* __restrict__ grad_c,                 // [tokens, heads, column tiles, state_dim]
    float* __restrict__ grad_decay,         // [tokens, num_heads, column tiles]; with CHANNELS
                                            // exp(s_last) <g, h>, [slots, heads, column tiles, state_dim]
    T* __restrict__ grad_scores,            // [slots, heads, column tiles, 64, 64], with CHANNELS
    float* __restrict__ grad_initial,       // [num_sequences, num_heads, state_dim, head_dim]
    const __grid_constant__ cukit::ScanParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  __shared__ float decays[kChunk];
  __shared__ Sums sums;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  cukit::wait_for_previous_grids();
  const cukit::ScanWork work(p, cu_seqlens, 0);
  const int column = work.column, columns = work.columns, length = work.length;

  const long long value_stride = static_cast<long long>(p.num_heads) * p.head_dim;
  const long long key_stride = static_cast<long long>(p.num_groups) * p.state_dim;
  const int tiles = static_cast<int>(gridDim.y);
  const long long part_stride = static_cast<long long>(p.heads) * tiles * p.state_dim;
  const int part = work.local_head * tiles + static_cast<int>(blockIdx.y);
  const long long value_at = work.begin * value_stride + work.head * p.head_dim + column;
  const long long key_at = work.begin * key_stride + work.group * p.state_dim;
  const long long part_at = work.begin * part_stride + static_cast<long long>(part) * p.state_dim;
  const long long state_size = static_cast<long long>(p.state_dim) * p.head_dim;
  if constexpr (!CHANNELS) log_decay += work.begin * p.num_heads + work.head;

  const unsigned base = cukit::shared_address(memory);
  unsigned char* const g_tile = memory + STAGES * kStageBytes;
  using Keys = cukit::TileCopy<kChunk, STATE_TILE, THREADS, PADDED>;
  using Values = cukit::TileCopy<kChunk, kColumns, THREADS, PADDED>;
  using States = cukit::TileCopy<STATE_TILE, kColumns, THREADS, PADDED>;
  const auto start = [&](int chunk, int stage) {
    const int token = chunk * kChunk;
    const int rows = length - token;
    const unsigned at = base + stage * kStageBytes;
    Keys::start(at + kKeys, b + key_at + token * key_stride, key_stride, rows, p.state_dim);
    Keys::start(at + kQueries, c + key_at + token * key_stride, key_stride, rows, p.state_dim);
    Values::start(at + kValues, x + value_at + token * value_stride, value_stride, rows, columns);
    Values::start(at + kGrads, grad_y + value_at + token * value_stride, value_stride, rows, columns);
    States::start(at + kState, chunk_states + work.chunk_place(p, chunk) * state_size + column,
                  p.head_dim, p.state_dim, columns);
  };

  StateValues g;
  cukit::clear(g);
  const Rows state_rows;
  if (grad_states != nullptr) {
    const float* from = grad_states + work.place(p) * state_size;
    state_rows.each(g, p, column, [&](float& value, int at) { value = from[at]; });
  }

  const cukit::ChunkDecays decay{decays};  // computed by warp 1
  const int quad_column = 2 * (lane % 4);
  const int row0 = 32 * (warp % 2);                     // first row of this warp in db, dc and dx
  const int key0 = STATE_TILE / 2 * (warp / 2);         // first column of this warp in db and dc
  const int value0 = kColumns / 2 * (warp / 2);         // first column of this warp in dx
  float own[2];
  if (work.first < work.end) {
    start(work.end - 1, 0);
    if (!CHANNELS && warp == 1) {
      cukit::read_decays(own, log_decay, p.num_heads, work.end - 1, length);
      decay.scan(own);
    }
    state_rows.round<T>(g_tile, g);
  }
  cukit::cp_async_commit();

#pragma unroll 1
  for (int chunk = work.end - 1; chunk >= work.first; --chunk) {
    const int stage = STAGES == 2 ? (work.end - 1 - chunk) % 2 : 0;
    const bool more = chunk > work.first;
    cukit::cp_async_wait<0>();
    __syncthreads();
    const long long slot = work.chunk_place(p, chunk);
    Decay last;
    if constexpr (CHANNELS) {
      cukit::TileCopy<kChunk, kChunk, THREADS, false>::start(base + STAGES * kStageBytes + kStateBytes,
                                                             scores + slot * (kChunk * kChunk), kChunk, kChunk,
                                                             kChunk);
      cukit::cp_async_commit();
      last.read(log_decay + slot * p.state_dim, state_rows, p.state_dim);
    } else {
      if (more && warp == 1) cukit::read_decays(own, log_decay, p.num_heads, chunk - 1, length);
      last.sums[0][0] = decay.last();
    }
    if constexpr (STAGES == 2) {
      if (more) start(chunk - 1, stage ^ 1);
      cukit::cp_async_commit();
    }
    const int token = chunk * kChunk;
    const int rows = length - token;
    // Opaque, so that the compiler does not keep addresses within the tiles in registers across chunks.
    const unsigned at = cukit::opaque(base + stage * kStageBytes);
    unsigned char* const tile = memory + (at - base);
    const unsigned g_at = at + (STAGES - stage) * kStageBytes;
    const unsigned score_at = g_at + kStateBytes;  // e (c . b)
    const unsigned grad_score_at = score_at + kScoreBytes;  // e (d . x)

    // Scores and their gradients, in tiles of 16 rows and 32 columns. In the second turn the first
    // two warps compute the second column tile of the last two row tiles.
#pragma unroll 1
    for (int turn = 0; turn < (warp < 2 ? 2 : 1); ++turn) {
      const int row_tile = turn == 0 ? warp : warp + 2;
      const int first_key = 32 * turn;
      const cukit::LeftMK<STATE_TILE> queries(at + kQueries, 16 * row_tile, 0);
      const cukit::RightNK<STATE_TILE> keys(at + kKeys, first_key, 0);
      const cukit::LeftMK<kColumns> grads(at + kGrads, 16 * row_tile, 0);
      const cukit::RightNK<kColumns> values(at + kValues, first_key, 0);
      float score[1][4][4], grad[1][4][4];
      cukit::clear(score);
      cukit::clear(grad);
      if constexpr (!CHANNELS) {
        cukit::warp_product<T, STATE_TILE / 16>(
            score, [&](unsigned(&r)[4], int, int k) { queries(r, 0, 16 * k); },
            [&](unsigned(&r)[4], int n, int k) { keys(r, 8 * n, 16 * k); });
      }
      cukit::warp_product<T, kColumns / 16>(
          grad, [&](unsigned(&r)[4], int, int k) { grads(r, 0, 16 * k); },
          [&](unsigned(&r)[4], int n, int k) { values(r, 8 * n, 16 * k); });
      float row_sum[2] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float column_sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * row_tile + lane / 4 + 8 * half;
          float decayed[2], decayed_grad[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_key + 8 * n + quad_column + i;
            float between = key <= row ? 1.0f : 0.0f;
            if (!CHANNELS && key <= row) between = exp2f(decay.cumsum[row] - decay.cumsum[key]);
            const float raw = score[0][n][2 * half + i];
            decayed[i] = key <= row ? raw * between : 0.0f;
            decayed_grad[i] = key <= row ? grad[0][n][2 * half + i] * between : 0.0f;
            const float product = key < row ? raw * decayed_grad[i] : 0.0f;
            row_sum[half] += product;
            column_sum[i] += product;
          }
          const unsigned to = Scores::offset(row, first_key / 8 + n) + 2 * quad_column;
          if constexpr (!CHANNELS) {
            *reinterpret_cast<unsigned*>(memory + (score_at - base) + to) =
                cukit::pack<T>(decayed[0], decayed[1]);
          }
          *reinterpret_cast<unsigned*>(memory + (grad_score_at - base) + to) =
              cukit::pack<T>(decayed_grad[0], decayed_grad[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int distance = 4; distance < kWarpSize; distance *= 2) {
            column_sum[i] += __shfl_xor_sync(cukit::kFullMask, column_sum[i], distance);
          }
          if (lane < 4) sums.columns[row_tile][first_key + 8 * n + quad_column + i] = column_sum[i];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[half] = cukit::warp_reduce<cukit::Sum, 4>(row_sum[half]);
        if (lane % 4 == 0) sums.rows[turn][16 * row_tile + lane / 4 + 8 * half] = row_sum[half];
      }
    }
    if constexpr (CHANNELS) cukit::cp_async_wait<STAGES - 1>();
    __syncthreads();
    if constexpr (CHANNELS) {
      // The second column tile of the first two row tiles, above the diagonal, has not been computed.
      T* const to = grad_scores + (slot * tiles + blockIdx.y) * (kChunk * kChunk);
      const unsigned char* const from = memory + (grad_score_at - base);
      cukit::store_tile<32, kChunk, THREADS, true>(to, kChunk, from, 0, kChunk, 32, threadIdx.x);
      cukit::store_tile<32, kChunk, THREADS, false>(to, kChunk, from, 32, kChunk, kChunk, threadIdx.x);
    }

    const cukit::LeftMK<kColumns> grads(at + kGrads, row0, 0);
    const cukit::LeftMK<kColumns> values(at + kValues, row0, 0);
    // 32 columns of dc and db at a time, because g occupies registers.
#pragma unroll 1
    for (int first = key0; first < key0 + STATE_TILE / 2; first += 32) {  // dc
      float out[2][4][4];
      cukit::clear(out);
      const cukit::RightNK<kColumns> state(at + kState, first, 0);
      cukit::warp_product<T, kColumns / 16>(
          out, [&](unsigned(&r)[4], int m, int k) { grads(r, 16 * m, 16 * k); },
          [&](unsigned(&r)[4], int n, int k) { state(r, 8 * n, 16 * k); });
      if constexpr (!CHANNELS) {
        scale_rows(out, row0, [&](int row) { return exp2f(decay.cumsum[row]); });
        dot_rows(sums.read[warp / 2], first > key0, out, tile + kQueries, row0, first);
        const cukit::LeftMK<kChunk> left(grad_score_at, row0, 0);
        const cukit::RightKN<STATE_TILE, 32> keys(at + kKeys, 0, first);
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step) {
          if (16 * step >= row0 + 32) break;
          cukit::warp_product<T, 1>(
              out, [&](unsigned(&r)[4], int m, int) { left(r, 16 * m, 16 * step); },
              [&](unsigned(&r)[4], int n, int) { keys(r, 16 * step, 8 * n); });
        }
      }
      T* to = grad_c + part_at + token * part_stride;
      cukit::store_rows<PADDED>(to, part_stride, out, row0, rows, first, p.state_dim);
    }
    const auto to_end = [&](int row) { return exp2f(last.at(0, 0) - decay.cumsum[row]); };
#pragma unroll 1
    for (int first = key0; first < key0 + STATE_TILE / 2; first += 32) {  // db
      float out[2][4][4];
      cukit::clear(out);
      const cukit::RightNK<kColumns> state(g_at, first, 0);
      cukit::warp_product<T, kColumns / 16>(
          out, [&](unsigned(&r)[4], int m, int k) { values(r, 16 * m, 16 * k); },
          [&](unsigned(&r)[4], int n, int k) { state(r, 8 * n, 16 * k); });
      if constexpr (!CHANNELS) {
        scale_rows(out, row0, to_end);
        dot_rows(sums.written[warp / 2], first > key0, out, tile + kKeys, row0, first);
        const cukit::LeftKM<kChunk, 32> left(grad_score_at, 0, row0);
        const cukit::RightKN<STATE_TILE, 32> queries(at + kQueries, 0, first);
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step) {
          if (16 * step < row0) continue;
          cukit::warp_product<T, 1>(
              out, [&](unsigned(&r)[4], int m, int) { left(r, 16 * step, 16 * m); },
              [&](unsigned(&r)[4], int n, int) { queries(r, 16 * step, 8 * n); });
        }
      }
      T* to = grad_b + part_at + token * part_stride;
      cukit::store_rows<PADDED>(to, part_stride, out, row0, rows, first, p.state_dim);
    }
    {  // dx
      float out[2][kColumns / 16][4];
      cukit::clear(out);
      const cukit::LeftMK<STATE_TILE> keys(at + kKeys, row0, 0);
      const cukit::RightKN<kColumns, kColumns / 2> state(g_at, 0, value0);
      cukit::warp_product<T, STATE_TILE / 16>(
          out, [&](unsigned(&r)[4], int m, int k) { keys(r, 16 * m, 16 * k); },
          [&](unsigned(&r)[4], int n, int k) { state(r, 16 * k, 8 * n); });
      if constexpr (!CHANNELS) scale_rows(out, row0, to_end);
      const cukit::LeftKM<kChunk, 32> left(score_at, 0, row0);
      const cukit::RightKN<kColumns, kColumns / 2> right(at + kGrads, 0, value0);
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        if (16 * step < row0) continue;
        cukit::warp_product<T, 1>(
            out, [&](unsigned(&r)[4], int m, int) { left(r, 16 * step, 16 * m); },
            [&](unsigned(&r)[4], int n, int) { right(r, 16 * step, 8 * n); });
      }
      T* to = grad_x + value_at + token * value_stride;
      cukit::store_rows<PADDED>(to, value_stride, out, row0, rows, value0, columns);
    }

    // <g, h>, then the gradient of the state before the chunk.
    float passing[Rows::kTiles][2] = {};
    state_rows.template scale_and_dot<T>(g, passing, last.factors(), tile + kState);
    if constexpr (CHANNELS) {
      Decay sums_of_rows;
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums_of_rows.sums[m][half] = cukit::warp_reduce<cukit::Sum, 4>(passing[m][half]);
        }
      sums_of_rows.write(grad_decay + (slot * tiles + blockIdx.y) * p.state_dim, state_rows, p.state_dim);
    } else {
      float whole = 0.0f;
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m) whole += passing[m][0] + passing[m][1];
      whole = cukit::warp_reduce<cukit::Sum>(whole);
      if (lane == 0) sums.passing[warp] = whole;
    }
    const cukit::LeftKM<STATE_TILE, 16> query_columns(at + kQueries, 0, 16 * warp);
    const cukit::RightKN<kColumns> grad_rows(at + kGrads, 0, 0);
#pragma unroll 1
    for (int step = 0; step < kChunk; step += 16) {
      float from_start[2][2];  // decay from the start of the chunk to this lane's tokens
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          from_start[side][i] = CHANNELS ? 1.0f : exp2f(decay.cumsum[step + 8 * side + quad_column + i]);
        }
      cukit::warp_product<T, 1>(
          g,
          [&](unsigned(&r)[4], int m, int) {
            query_columns(r, step, 64 * m);
            if constexpr (CHANNELS) return;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float pair[2];
              cukit::unpack<T>(pair, r[i]);
              r[i] = cukit::pack<T>(pair[0] * from_start[i / 2][0], pair[1] * from_start[i / 2][1]);
            }
          },
          [&](unsigned(&r)[4], int n, int) { grad_rows(r, step, 8 * n); });
    }
    __syncthreads();  // all warps have read the tiles, and their sums are visible

    if constexpr (STAGES == 1) {
      if (more) start(chunk - 1, 0);
      cukit::cp_async_commit();
    }
    if (more) state_rows.round<T>(g_tile, g);
    if (!CHANNELS && more && warp == 1) decay.scan(own);
    if (!CHANNELS && warp == 0) {
      float change[2], total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * lane + i;
        float begins = 0.0f;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (row < 32 || r >= 2) begins += sums.columns[r][row];
        }
        const float ends = sums.rows[0][row] + (row >= 32 ? sums.rows[1][row] : 0.0f);
        const float read = sums.read[0][row] + sums.read[1][row];
        const float written = sums.written[0][row] + sums.written[1][row];
        change[i] = begins - ends + written - read;
        total += read;
      }
      total = cukit::warp_reduce<cukit::Sum>(total);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums.passing[w];
      cukit::write_decay_gradients(grad_decay + ((work.begin * p.num_heads + work.head) * tiles + blockIdx.y), change,
                                   total, log_decay, token, length, p.num_heads, tiles);
    }
  }
  cukit::cp_async_wait<0>();

  if (work.segment == 0) {
    float* to = grad_initial + work.whole_place(p) * state_size;
    state_rows.each(g, p, column, [&](float& value, int at) { to[at] = value; });
  }
}
