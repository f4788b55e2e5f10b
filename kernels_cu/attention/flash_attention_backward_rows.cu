// Row-wise kernels before and after the main kernels of the attention backward.
//
// flash_attention_backward_prepare: delta = sum(dO * O) and lse * log2(e) of every query, padded to
//   full tiles. Rows beyond the last query, and rows without a visible key, get delta = 0 and
//   lse = +infinity, so that exp(score - lse) is 0. Zeroes the float32 sum of dQ or, with COUNTED,
//   the counters of its tiles.
// attention_kl_backward_prepare: for the divergence of two models' attention
//   (attention_kl_sm80.cu), lse * log2(e) - log2(row weight) of both models, so that exp(score -
//   lse) is the probability times the weight; +infinity for rows without a visible key or with
//   weight 0. Zeroes the sum or the counters as flash_attention_backward_prepare does.
// flash_attention_backward_finish: dQ = scale * sum, converted from blocks (query_gradient.cuh) to
//   rows.
// flash_attention_backward_sum: dK or dV, the sum of the float32 partial sums of a head's splits.
// flash_attention_backward_sinks: dsink = -sum over the queries of exp(sink - lse) * delta; a sink
//   is a key whose value is zero.
//
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, line 4.
// Mapping: prepare: LANES lanes per row, 16 bytes per lane. finish: one block per TILE_M rows of a
//   head, 16x8 blocks per warp. Both start with the last rows: prepare leaves in L2 the rows that
//   the next kernel reads first, and finish reads from L2 the rows that were accumulated last.
//   sum: eight elements per thread, splits added in order. sinks: one block per head.
// Shared memory of finish: TILE_M * HEAD_DIM * 2 bytes, dynamic; of sinks: a float per warp,
//   static.
// Macros: DTYPE float16|bfloat16; HEAD_DIM, VALUE_DIM 64|96|128|256; PADDED, VALUE_PADDED 0|1: the
//   head is smaller than the tile; THREADS; LANES power of two, >= HEAD_DIM / 8 and VALUE_DIM / 8
//   (prepare); QUERY_GRADIENT 0|1: dQ is summed in float32 (prepare); TILE_M multiple of 16; VARLEN
//   0|1.
//   Optional, default 0: COUNTED 0|1: counters record which tiles of the sum have been stored
//   (backward_sums.cuh), so that the sum need not start at zero; TRANSPOSED 0|1: the sum is stored
//   as blocks of its transpose (query_gradient.cuh); DISTILL 0|1: finish also multiplies by a
//   factor in device memory; ROPE 0|1: finish applies the inverse rotation of each query's position
//   to dQ (not with PADDED or VARLEN).
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/attention.py.
#include "attention/parameters.cuh"
#include "attention/query_gradient.cuh"
#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/movmatrix.cuh"
#include "common/ptx/pack.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

#ifndef COUNTED
#define COUNTED 0
#endif
#ifndef DISTILL
#define DISTILL 0
#endif
#ifndef ROPE
#define ROPE 0
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif

namespace {

using T = cukit::element_t;

// Zeroes a row of the sum of dQ or, with COUNTED, the counters of its tile.
CUKIT_DEVICE void init_sum(float* grad_q_sum, int* counters, long long row, int lane) {
  if (COUNTED && lane == 0 && row % TILE_M == 0) {
    counters[1 + row / TILE_M] = 0;
    if (row == 0) counters[0] = 0;
  }
  if (QUERY_GRADIENT && !COUNTED && lane < HEAD_DIM / 8) {
    float4* zeros = reinterpret_cast<float4*>(grad_q_sum + row * HEAD_DIM);
    zeros[lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    zeros[lane + HEAD_DIM / 8] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_prepare(
    const T* __restrict__ out,       // [batch, seq_q, heads_q, value_dim]
    const T* __restrict__ grad_out,  // as out
    const float* __restrict__ lse,   // [batch, heads_q, seq_q]; VARLEN: [heads_q, total_q]
    float* __restrict__ lse_log2,    // scratch rows
    float* __restrict__ delta,       // scratch rows
    float* __restrict__ grad_q_sum,  // scratch rows of HEAD_DIM
    int* __restrict__ counters,      // COUNTED: [1 + tiles of the scratch]
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
    const __grid_constant__ cukit::RowStatisticsParameters params) {
  const long long block = gridDim.x - 1 - blockIdx.x;
  const long long row = (block * THREADS + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const int heads = VARLEN ? params.heads_q : params.batch * params.heads_q;
  const bool within = row < static_cast<long long>(heads) * params.rows_per_head;
  const cukit::ScratchPlace place = cukit::scratch_place(
      within ? row : 0, params.batch, params.heads_q, params.seq_q, params.rows_per_head,
      cu_seqlens_q);
  const bool exists = within && place.query < place.seq_q;
  const long long query = place.first_q + place.query;

  float sum = 0.0f;
  if (exists && lane * 8 < params.value_dim) {
    cukit::Vec<T, 8> o, g;
    cukit::load(o, out + place.b * params.out.batch + query * params.out.row +
                       place.head * params.out.head + lane * 8);
    cukit::load(g, grad_out + place.b * params.grad_out.batch + query * params.grad_out.row +
                       place.head * params.grad_out.head + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += cukit::to_float(o[i]) * cukit::to_float(g[i]);
  }
  sum = cukit::warp_reduce<cukit::Sum, LANES>(sum);
  if (!within) return;

  if (lane == 0) {
    const long long head = VARLEN ? place.head : place.b * params.heads_q + place.head;
    const int rows_of_head = VARLEN ? params.total_q : params.seq_q;
    const float own = exists ? lse[head * rows_of_head + query] : -cukit::infinity();
    const bool dead = own == -cukit::infinity();
    lse_log2[row] = dead ? cukit::infinity() : own * cukit::kLog2E;
    delta[row] = dead ? 0.0f : sum;
  }
  init_sum(grad_q_sum, counters, row, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_kl_backward_prepare(
    const float* __restrict__ lse_s,  // [batch, heads_q, seq_q]; VARLEN: [heads_q, total_q]
    const float* __restrict__ lse_t,  // as lse_s
    const float* __restrict__ query_weights,  // [batch, seq_q]; VARLEN: [total_q]; null: 1
    const float* __restrict__ row_weights,    // as lse_s; null: 1
    float* __restrict__ lse_log2,     // scratch rows, of the student
    float* __restrict__ teacher_log2,  // scratch rows
    float* __restrict__ grad_q_sum,    // scratch rows of HEAD_DIM
    int* __restrict__ counters,        // COUNTED: [1 + tiles of the scratch]
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
    const __grid_constant__ cukit::KlRowParameters params) {
  const long long block = gridDim.x - 1 - blockIdx.x;
  const long long row = (block * THREADS + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const int heads = VARLEN ? params.heads_q : params.batch * params.heads_q;
  if (row >= static_cast<long long>(heads) * params.rows_per_head) return;
  if (lane == 0) {
    const cukit::ScratchPlace place = cukit::scratch_place(
        row, params.batch, params.heads_q, params.seq_q, params.rows_per_head, cu_seqlens_q);
    const int rows_of_head = VARLEN ? params.total_q : params.seq_q;
    const long long query = place.first_q + place.query;
    const long long head = VARLEN ? place.head : place.b * params.heads_q + place.head;
    const long long at = head * rows_of_head + query;
    float own = cukit::infinity(), teacher = cukit::infinity();
    if (place.query < place.seq_q) {
      float weight = 1.0f;
      if (query_weights != nullptr) {
        weight = query_weights[(VARLEN ? 0 : static_cast<long long>(place.b) * rows_of_head) + query];
      }
      if (row_weights != nullptr) weight *= row_weights[at];
      const float shift = log2f(weight);  // log2f(0) is -infinity, of a negative weight NaN
      const bool dead = lse_s[at] == -cukit::infinity() || lse_t[at] == -cukit::infinity();
      if (!dead) {
        own = fmaf(lse_s[at], cukit::kLog2E, -shift);
        teacher = fmaf(lse_t[at], cukit::kLog2E, -shift);
      }
    }
    lse_log2[row] = own;
    teacher_log2[row] = teacher;
  }
  init_sum(grad_q_sum, counters, row, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_finish(
    const float* __restrict__ grad_q_sum,  // scratch rows of HEAD_DIM, in blocks
    const int* __restrict__ counters,      // as in prepare
    T* __restrict__ grad_q,                // [batch, seq_q, heads_q, head_dim], rows strided
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
#if DISTILL
    const float* __restrict__ upstream,  // scalar or null (1): factor of dQ
#endif
#if ROPE
    const float* __restrict__ cos,  // [seq_q or batch * seq_q, HEAD_DIM / 2]
    const float* __restrict__ sin,  // as cos
#endif
    const __grid_constant__ cukit::QuerySumParameters params) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
#if DISTILL
  const float scale = upstream != nullptr ? params.scale * *upstream : params.scale;
#else
  const float scale = params.scale;
#endif
  constexpr int kColumns = HEAD_DIM / 8;
  const int lane = threadIdx.x % cukit::kWarpSize;
  const long long index = gridDim.x - 1 - blockIdx.x;
  const long long first = index * TILE_M;
  const cukit::ScratchPlace place =
      cukit::scratch_place(first, params.batch, params.heads_q, params.seq_q,
                           params.rows_per_head, cu_seqlens_q);
  const int rows = place.seq_q - place.query;
  if (VARLEN && rows <= 0) return;
  const bool summed = !COUNTED || counters[1 + index] > 0;
  const float* blocks = grad_q_sum + cukit::query_block<HEAD_DIM>(first, 0);
#pragma unroll 4
  for (int i = threadIdx.x / cukit::kWarpSize; i < TILE_M / 16 * kColumns;
       i += THREADS / cukit::kWarpSize) {
    float acc[4] = {};
    if (summed) cukit::read_query_block(acc, blocks + i * cukit::kQueryBlock, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned pair =
          cukit::pack<T>(acc[2 * half] * scale, acc[2 * half + 1] * scale);
#if TRANSPOSED
      pair = cukit::transpose_8x8(pair);
      const int row = i % (TILE_M / 8) * 8, chunk = i / (TILE_M / 8) * 2 + half;
#else
      const int row = i / kColumns * 16 + half * 8, chunk = i % kColumns;
#endif
      *reinterpret_cast<unsigned*>(
          tile + cukit::Swizzle<HEAD_DIM>::offset(row + lane / 4, chunk) + lane % 4 * 4) = pair;
    }
  }
  __syncthreads();
  const long long row_stride = params.grad_q_row;
  const long long query = VARLEN ? place.first_q + place.query
                                 : static_cast<long long>(place.b) * params.seq_q + place.query;
  T* const to = grad_q + query * row_stride + place.head * params.head_dim;
#if ROPE
  static_assert(!PADDED && !VARLEN, "the table row is the query's row, and rotated pairs are HEAD_DIM / 2 columns apart");
  const long long angle = (params.table_rows ? query : place.query) * (HEAD_DIM / 2);
  for (int i = threadIdx.x; i < TILE_M * kColumns / 2; i += THREADS) {
    const int row = i / (kColumns / 2), chunk = i % (kColumns / 2);
    if (row >= rows) continue;
    const auto at = [&](int chunk) {
      return reinterpret_cast<T*>(tile + cukit::Swizzle<HEAD_DIM>::offset(row, chunk));
    };
    cukit::Vec<T, 8> first, second;
    cukit::load(first, at(chunk));
    cukit::load(second, at(chunk + kColumns / 2));
    cukit::Vec<float, 4> cosines[2], sines[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long table = angle + row * (HEAD_DIM / 2) + chunk * 8 + half * 4;
      cukit::load<cukit::Cache::Kept>(cosines[half], cos + table);
      cukit::load<cukit::Cache::Kept>(sines[half], sin + table);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = cukit::to_float(first[j]), b = cukit::to_float(second[j]);
      const float c = cosines[j / 4][j % 4], s = sines[j / 4][j % 4];
      first[j] = cukit::from_float<T>(a * c + b * s);
      second[j] = cukit::from_float<T>(b * c - a * s);
    }
    cukit::store(to + row * row_stride + chunk * 8, first);
    cukit::store(to + row * row_stride + chunk * 8 + HEAD_DIM / 2, second);
  }
#else
  cukit::store_tile<TILE_M, HEAD_DIM, THREADS, PADDED>(to, row_stride, tile, 0, rows,
                                                       params.head_dim, threadIdx.x);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_sum(
    const float* __restrict__ partial,  // [rows, heads, splits, head_dim]
    T* __restrict__ gradient,           // [rows, heads, head_dim], rows strided
    long long rows, int heads, int splits, int head_dim, int row_stride) {
  const int chunks = head_dim / 8;
  const long long index = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= rows * heads * chunks) return;
  const long long item = index / chunks;  // index into [rows, heads]
  const int column = static_cast<int>(index % chunks) * 8;
  float sum[8] = {};
  for (int split = 0; split < splits; ++split) {
    const float* from = partial + (item * splits + split) * head_dim + column;
    cukit::Vec<float, 4> low, high;
    cukit::load<cukit::Cache::Streaming>(low, from);
    cukit::load<cukit::Cache::Streaming>(high, from + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] += low[i];
      sum[i + 4] += high[i];
    }
  }
  cukit::Vec<T, 8> out;
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = cukit::from_float<T>(sum[i]);
  cukit::store(gradient + item / heads * row_stride + item % heads * head_dim + column, out);
}

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_sinks(
    const float* __restrict__ lse_log2,  // scratch rows, [parts, heads_q, rows_per_head]
    const float* __restrict__ delta,     // as lse_log2
    const float* __restrict__ sinks,     // [heads_q]
    float* __restrict__ grad_sinks,      // [heads_q]
    int parts, int heads_q, int rows_per_head) {
  __shared__ float partial[THREADS / cukit::kWarpSize];
  const int head = blockIdx.x;
  const float sink = sinks[head] * cukit::kLog2E;
  float sum = 0.0f;
  for (int part = 0; part < parts; ++part) {
    const long long first = (static_cast<long long>(part) * heads_q + head) * rows_per_head;
    for (int row = threadIdx.x; row < rows_per_head; row += THREADS) {
      sum += exp2f(sink - lse_log2[first + row]) * delta[first + row];
    }
  }
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, partial);
  if (threadIdx.x == 0) grad_sinks[head] = -sum;
}
