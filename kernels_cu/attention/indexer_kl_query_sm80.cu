// Gradients of an indexer's queries and head weights, from the derivatives with respect to its
// scores.
//
//   x = q k^T      dx = w dI [x > 0]      dq = scale dx k      dw = scale sum_j dI max(0, x)
//
// indexer_kl_sweep (GRADIENT) has written dI of a chunk of queries, times kGradientUnit.
// Paper: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556.
// Mapping: block (head, tile of the chunk); a warp owns 16 queries and iterates over the keys in
//   tiles of TILE_N; the next tile is copied meanwhile. dx is a register operand of its product.
// Shared memory, bytes, dynamic: 2 (HEAD_DIM (TILE_M + 2 TILE_N) + 2 TILE_M TILE_N):
//   q | k, two stages | dI, two.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|96|128|256; PADDED; TILE_M = 16 * warps; TILE_N
//   multiple of 32; THREADS; BLOCKS_PER_SM; CAUSAL, VARLEN of score_options.cuh.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/indexer_kl.py.
#include "attention/indexer_work.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kQueryBytes = TILE_M * HEAD_DIM * 2;
constexpr int kKeyBytes = TILE_N * HEAD_DIM * 2;
constexpr int kDerivativeBytes = TILE_M * TILE_N * 2;

static_assert(TILE_M == THREADS / cukit::kWarpSize * 16, "each warp owns 16 queries");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) indexer_kl_query_sm80(
    const T* __restrict__ q,                 // [batch, seq_q, heads_s, head_dim]
    const T* __restrict__ k,                 // [batch, seq_kv, head_dim]
    const float* __restrict__ head_weights,  // [batch, heads_s, seq_q]; VARLEN: [heads_s, total_q]
    const T* __restrict__ derivatives,       // [chunk rows, scratch_row]
    T* __restrict__ grad_q,                  // [batch, seq_q, heads_s, head_dim], contiguous
    float* __restrict__ grad_weights,        // [batch, seq_q, heads_s]
    const float* __restrict__ upstream,      // scalar or null (1): factor of dq and dw
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,   // [batch + 1]
    const __grid_constant__ cukit::IndexerParameters params, int first_tile) {
  const cukit::ScoreSettings& settings = params.settings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const int head = static_cast<int>(blockIdx.x) % params.heads_s;
  const int index = static_cast<int>(blockIdx.x) / params.heads_s;
  const int tile_of_chunk = CAUSAL ? params.chunk_tiles - 1 - index : index;
  const cukit::IndexerWork work(tile_of_chunk, first_tile, params, cu_seqlens_q, cu_seqlens_kv);
  if (work.rows_left <= 0) return;
  const int seq_kv = work.sequence.seq_kv;
  const cukit::TileRange range = work.keys<TILE_N>(settings);

  const int warp_row = static_cast<int>(threadIdx.x) / cukit::kWarpSize * 16;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x) % cukit::kWarpSize / 4;
  const unsigned q_tile = cukit::shared_address(shared);
  const unsigned k_tile = q_tile + kQueryBytes;
  const unsigned d_tile = k_tile + 2 * kKeyBytes;
  const long long row_of_q = work.sequence.first_q + work.first_row;
  q += cukit::offset_of(params.q_s, work.b, row_of_q, head);
  k += cukit::offset_of(params.k_s, work.b, work.sequence.first_kv, 0);
  derivatives += work.scratch * params.scratch_row;

  // Each copy recomputes its addresses: addresses kept throughout the loop would occupy registers
  // that the accumulators need.
  const auto again = [](long long stride) {
    return static_cast<long long>(static_cast<int>(cukit::opaque(static_cast<unsigned>(stride))));
  };
  const auto copy = [&](int tile, int stage) {
    const int key = tile * TILE_N;
    cukit::TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>::start(
        k_tile + stage * kKeyBytes, k + key * params.k_s.row, again(params.k_s.row), seq_kv - key,
        params.head_dim);
    cukit::TileCopy<TILE_M, TILE_N, THREADS, false>::start(
        d_tile + stage * kDerivativeBytes, derivatives + key, again(params.scratch_row), TILE_M,
        TILE_N);
    cukit::cp_async_commit();
  };
  cukit::TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>::start(q_tile, q, params.q_s.row,
                                                           work.rows_left, params.head_dim);
  if (range.end > range.begin) copy(range.begin, 0);
  cukit::cp_async_commit();

  float weight[2];
  const long long first_weight =
      cukit::row_statistics(work.b, head, params.heads_s, work.sequence, settings) + work.first_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half;
    weight[half] = row < work.rows_left ? head_weights[first_weight + row] : 0.0f;
  }
  const cukit::LeftMK<HEAD_DIM> q_left(q_tile, warp_row, 0);
  const cukit::RightNK<HEAD_DIM> k_first(k_tile, 0, 0);
  const cukit::RightKN<HEAD_DIM> k_again(k_tile, 0, 0);
  const cukit::LeftMK<TILE_N> d_left(d_tile, warp_row, 0);
  float dq[1][HEAD_DIM / 8][4];
  float dw[2] = {};
  cukit::clear(dq);
#pragma unroll 1
  for (int tile = range.begin; tile < range.end; ++tile) {
    cukit::cp_async_wait<0>();
    __syncthreads();  // this tile has been copied, and no warp reads the other stage any more
    const int stage = (tile - range.begin) % 2;
    if (tile + 1 < range.end) copy(tile + 1, stage ^ 1);
    float x[1][TILE_N / 8][4];
    cukit::clear(x);
    cukit::warp_product<T, HEAD_DIM / 16>(
        x, [&](unsigned(&r)[4], int, int step) { q_left(r, 0, 16 * step); },
        [&](unsigned(&r)[4], int n, int step) { k_first(r, 8 * n, 16 * step, stage * kKeyBytes); });
    unsigned dx[TILE_N / 16][4];
#pragma unroll
    for (int step = 0; step < TILE_N / 16; ++step) {
      unsigned packed[4];
      d_left(packed, 0, 16 * step, stage * kDerivativeBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float d[2];
        cukit::unpack<T>(d, packed[j]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float own = x[0][2 * step + j / 2][j % 2 * 2 + i];
          const bool counts = own > 0.0f && d[i] != 0.0f;
          dw[j % 2] = counts ? fmaf(d[i], own, dw[j % 2]) : dw[j % 2];
          d[i] = counts ? d[i] * weight[j % 2] : 0.0f;
        }
        dx[step][j] = cukit::pack<T>(d[0], d[1]);
      }
    }
    cukit::warp_product<T, TILE_N / 16>(
        dq,
        [&](unsigned(&r)[4], int, int step) {
#pragma unroll
          for (int j = 0; j < 4; ++j) r[j] = dx[step][j];
        },
        [&](unsigned(&r)[4], int n, int step) { k_again(r, 16 * step, 8 * n, stage * kKeyBytes); });
  }
  cukit::cp_async_wait<0>();
  __syncthreads();

  const float scale = upstream != nullptr ? params.grad_scale * *upstream : params.grad_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      *reinterpret_cast<unsigned*>(shared + cukit::Swizzle<HEAD_DIM>::offset(row, n) +
                                   threadIdx.x % 4 * 4) =
          cukit::pack<T>(dq[0][n][2 * half] * scale, dq[0][n][2 * half + 1] * scale);
    }
    dw[half] += __shfl_xor_sync(cukit::kFullMask, dw[half], 1);
    dw[half] += __shfl_xor_sync(cukit::kFullMask, dw[half], 2);
    const long long query = (VARLEN ? 0 : static_cast<long long>(work.b) * params.seq_q) + row_of_q + row;
    if (threadIdx.x % 4 == 0 && row < work.rows_left) {
      grad_weights[query * params.heads_s + head] = dw[half] * scale;
    }
  }
  __syncthreads();
  const long long row_stride = static_cast<long long>(params.heads_s) * params.head_dim;
  const long long query = (VARLEN ? 0 : static_cast<long long>(work.b) * params.seq_q) + row_of_q;
  cukit::store_tile<TILE_M, HEAD_DIM, THREADS, PADDED>(
      grad_q + query * row_stride + head * params.head_dim, row_stride, shared, 0, work.rows_left,
      params.head_dim, threadIdx.x);
}
