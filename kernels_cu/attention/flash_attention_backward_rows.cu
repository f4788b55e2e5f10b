// What comes before and after the backward of attention, row by row.
//
// flash_attention_backward_prepare:  delta = sum(dO * O) and lse * log2(e) of every query, padded to
//   whole tiles: rows beyond the last query, and rows that see no key, get delta = 0 and
//   lse = +infinity, so that exp(score - lse) is 0. Zeroes the sum of dQ.
// flash_attention_backward_finish:   dQ = scale * sum, from blocks (query_gradient.cuh) to rows.
// flash_attention_backward_sum:      dK or dV from the float32 sums of the blocks that shared a head.
//
// Paper: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, line 4.
// Mapping: prepare: LANES lanes a row, 16 bytes a lane. finish: a block TILE_M rows of one head, a warp
//   16x8 blocks. sum: a thread eight elements, splits in order. Shared memory of finish: TILE_M * HEAD_DIM * 2 bytes, dynamic.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED 0|1 head_dim is smaller than HEAD_DIM;
//   THREADS; LANES power of two, >= HEAD_DIM / 8 (prepare); QUERY_GRADIENT 0|1 whether there is a sum
//   to zero (prepare); TILE_M multiple of 16 (finish).
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/attention.py.
#include "attention/query_gradient.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr float kLog2E = 1.4426950408889634f;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_prepare(
    const T* __restrict__ out,       // [batch, seq_q, heads_q, head_dim]
    const T* __restrict__ grad_out,  // as out
    const float* __restrict__ lse,   // [batch * heads_q, seq_q], natural logarithm
    float* __restrict__ lse_log2,    // [batch * heads_q, seq_q_padded]
    float* __restrict__ delta,       // as lse_log2
    float* __restrict__ grad_q_sum,  // [batch * heads_q, seq_q_padded, HEAD_DIM]
    long long out_batch, long long out_row, long long out_head,  // strides in elements
    long long grad_out_batch, long long grad_out_row, long long grad_out_head,
    int batch, int heads_q, int seq_q, int seq_q_padded, int head_dim) {
  const long long row = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const int batch_head = static_cast<int>(row / seq_q_padded);
  const int query = static_cast<int>(row % seq_q_padded);
  const bool within = batch_head < batch * heads_q;

  float sum = 0.0f;
  if (within && query < seq_q && lane * 8 < head_dim) {
    const long long b = batch_head / heads_q;
    const long long head = batch_head % heads_q;
    cukit::Vec<T, 8> o, g;
    cukit::load(o, out + b * out_batch + query * out_row + head * out_head + lane * 8);
    cukit::load(g, grad_out + b * grad_out_batch + query * grad_out_row + head * grad_out_head +
                       lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += cukit::to_float(o[i]) * cukit::to_float(g[i]);
  }
  sum = cukit::warp_reduce<cukit::Sum, LANES>(sum);
  if (!within) return;

  if (lane == 0) {
    const float own = query < seq_q ? lse[static_cast<long long>(batch_head) * seq_q + query]
                                    : -cukit::infinity();
    const bool dead = own == -cukit::infinity();
    lse_log2[row] = dead ? cukit::infinity() : own * kLog2E;
    delta[row] = dead ? 0.0f : sum;
  }
  if (QUERY_GRADIENT && lane < HEAD_DIM / 8) {
    float4* zeros = reinterpret_cast<float4*>(grad_q_sum + row * HEAD_DIM);
    zeros[lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    zeros[lane + HEAD_DIM / 8] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_finish(
    const float* __restrict__ grad_q_sum,  // [batch * heads_q, seq_q_padded, HEAD_DIM], in blocks
    T* __restrict__ grad_q,                // [batch, seq_q, heads_q, head_dim], contiguous
    int heads_q, int seq_q, int seq_q_padded, int head_dim, float scale) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  constexpr int kColumns = HEAD_DIM / 8;
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int tiles = seq_q_padded / TILE_M;
  const int batch_head = blockIdx.x / tiles;
  const int first_row = blockIdx.x % tiles * TILE_M;
  const float* blocks =
      grad_q_sum + cukit::query_block<HEAD_DIM>(
                       static_cast<long long>(batch_head) * seq_q_padded + first_row, 0);
#pragma unroll 4
  for (int i = threadIdx.x / cukit::kWarpSize; i < TILE_M / 16 * kColumns;
       i += THREADS / cukit::kWarpSize) {
    float acc[4];
    cukit::read_query_block(acc, blocks + i * cukit::kQueryBlock, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i / kColumns * 16 + half * 8 + lane / 4;
      *reinterpret_cast<unsigned*>(tile + cukit::Swizzle<HEAD_DIM>::offset(row, i % kColumns) +
                                   lane % 4 * 4) =
          cukit::pack<T>(acc[2 * half] * scale, acc[2 * half + 1] * scale);
    }
  }
  __syncthreads();
  const long long row_stride = static_cast<long long>(heads_q) * head_dim;
  T* to = grad_q + (static_cast<long long>(batch_head / heads_q) * seq_q + first_row) * row_stride +
          batch_head % heads_q * head_dim;
  cukit::store_tile<TILE_M, HEAD_DIM, THREADS, PADDED>(to, row_stride, tile, 0, seq_q - first_row,
                                                       head_dim, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_backward_sum(
    const float* __restrict__ partial,  // [rows, splits, head_dim]
    T* __restrict__ gradient,           // [rows, head_dim]
    long long rows, int splits, int head_dim) {
  const int chunks = head_dim / 8;
  const long long index = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= rows * chunks) return;
  const long long row = index / chunks;
  const int column = static_cast<int>(index % chunks) * 8;
  float sum[8] = {};
  for (int split = 0; split < splits; ++split) {
    const float* from = partial + (row * splits + split) * head_dim + column;
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
  cukit::store(gradient + row * head_dim + column, out);
}
