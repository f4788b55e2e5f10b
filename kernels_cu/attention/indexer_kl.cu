// Divergence of a sparse-attention indexer from the attention that it predicts, query by query,
// without a score matrix in global memory:
//
//   P_ij = sum_h exp(scale_t q_t[i,h] k_t[j] - lse_t[i,h])
//   I_ij = scale_s sum_h w[i,h] max(0, q_s[i,h] k_s[j])
//   KL_i = sum_j p_ij (ln p_ij - ln softmax(I_i)_j),  p_i = P_i / sum_j P_ij
//
// over the keys that are visible to the query and, with SELECTED, were selected for it. With A =
// sum P ln P, C = sum P I and M = sum P: KL = (A - C) / M - ln M + lse(I). GRADIENT: instead of the
// sums, the derivative with respect to I of every (query, key) pair of a chunk of queries,
// softmax(I) - p, times the query's weight, upstream gradient and kGradientUnit.
//
// indexer_kl_sweep: the sums of a tile of queries over a span of keys or, with GRADIENT, the
//   derivatives.
// indexer_kl_rows:  adds the spans in order: KL, lse(I) and M / heads_t of every query.
//
// Paper: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556 (lightning indexer); Milakov and
//   Gimelshein, arXiv:1805.02867 (the running sums).
// Mapping: block (tile of the chunk, span of keys); a warp owns 16 queries. For each tile of keys,
//   the products of the teacher's heads and then of the student's use the same accumulators; each
//   lane adds their contributions to the tile's P and I in registers. The operands of the next head
//   are copied meanwhile; keys are copied once for all heads that share them.
// Shared memory, dynamic: queries, two stages | keys, two stages: 4 W (TILE_M + TILE_N) bytes, W
//   the larger of HEAD_DIM and VALUE_DIM, with WGMMA rounded up to a multiple of 64.
// Macros: DTYPE float16|bfloat16; HEAD_DIM of the student and VALUE_DIM of the teacher
//   64|96|128|256; PADDED, VALUE_PADDED; TILE_M = 16 * warps, with WGMMA a multiple of 64; TILE_N
//   multiple of 32; THREADS; BLOCKS_PER_SM; WGMMA, GRADIENT, SELECTED 0|1; KEY_TILE, multiple of
//   TILE_N: derivatives are written for full tiles of KEY_TILE keys; CAUSAL, VARLEN of
//   score_options.cuh.
// Minimum architecture: sm_80; with WGMMA sm_90a only. Accumulates in float in a fixed order:
//   deterministic.
// Reference: cukit/reference/indexer_kl.py.
#include "attention/indexer_products.cuh"
#include "attention/indexer_work.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/scores/score_options.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Scores = cukit::IndexerScores;

constexpr int kScores = TILE_N / 2;      // per lane
constexpr int kWords = TILE_N / 32;      // of a row's selection
constexpr int kWidth = HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM;
constexpr int kQueryBytes = cukit::indexer_tile_bytes(TILE_M, kWidth);
constexpr int kKeyBytes = cukit::indexer_tile_bytes(TILE_N, kWidth);
constexpr float kMaskedScore = -1e30f;
constexpr float kNoScore = -1e29f;  // the maximum before the first visible key
constexpr int kStatistics = 5;      // maximum, sum, A, C, M

static_assert(TILE_M == THREADS / cukit::kWarpSize * 16, "16 rows per warp");
static_assert(TILE_N % 32 == 0 && KEY_TILE % TILE_N == 0, "tiles start at word boundaries of the selection");

CUKIT_DEVICE float quad_sum(float value) {
  value += __shfl_xor_sync(cukit::kFullMask, value, 1);
  return value + __shfl_xor_sync(cukit::kFullMask, value, 2);
}

// A lane's sums over its two rows, in log2 units.
struct RowSums {
  cukit::SoftmaxRows student;
  float entropy[2], cross[2], mass[2];  // A, C, M

  CUKIT_DEVICE RowSums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      student.max[half] = kNoScore;
      student.sum[half] = entropy[half] = cross[half] = mass[half] = 0.0f;
    }
  }

  // Adds a tile. For masked pairs, p is 0 and u is kMaskedScore.
  CUKIT_DEVICE void add(const float (&p)[kScores], const float (&u)[kScores]) {
    float shrink[2];
    cukit::update_maxima(student, shrink, u, 1.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float own[4] = {};
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * n + 2 * half + i;
          own[0] += exp2f(u[at] - student.max[half]);
          own[1] = fmaf(p[at], p[at] > 0.0f ? log2f(p[at]) : 0.0f, own[1]);
          own[2] = fmaf(p[at], p[at] == 0.0f ? 0.0f : u[at], own[2]);
          own[3] += p[at];
        }
      student.sum[half] += own[0];
      entropy[half] += own[1];
      cross[half] += own[2];
      mass[half] += own[3];
    }
  }

  // `to`: the first statistic of the lane's first row; its other statistics follow `step` floats
  // apart.
  CUKIT_DEVICE void write(float* to, long long step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sums[kStatistics] = {student.max[half], quad_sum(student.sum[half]),
                                       quad_sum(entropy[half]), quad_sum(cross[half]),
                                       quad_sum(mass[half])};
      if (threadIdx.x % 4 != 0) continue;
#pragma unroll
      for (int i = 0; i < kStatistics; ++i) to[i * step + 8 * half] = sums[i];
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) indexer_kl_sweep(
    const T* __restrict__ q_t,        // [batch, seq_q, heads_t, teacher_dim]
    const T* __restrict__ k_t,        // [batch, seq_kv, heads_t / group, teacher_dim]
    const float* __restrict__ lse_t,  // [batch, heads_t, seq_q]; VARLEN: [heads_t, total_q]
    const T* __restrict__ q_s,        // [batch, seq_q, heads_s, head_dim]
    const T* __restrict__ k_s,        // [batch, seq_kv, head_dim]
    const float* __restrict__ head_weights,  // as lse_t, of heads_s
    const unsigned* __restrict__ selected,   // SELECTED: bits [chunk rows, scratch_row / 32]
#if GRADIENT
    const float* __restrict__ lse_s,        // [batch, seq_q]; VARLEN: [total_q]
    const float* __restrict__ mass_t,       // as lse_s: M / heads_t
    const float* __restrict__ row_weights,  // as lse_s, or null: 1
    const float* __restrict__ row_grads,    // as lse_s, or null: 1
    T* __restrict__ derivatives,            // [chunk rows, scratch_row]
#else
    float* __restrict__ partials,  // [spans, kStatistics, chunk rows]
#endif
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
    const __grid_constant__ cukit::IndexerParameters params, int first_tile) {
  const cukit::ScoreSettings& settings = params.settings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const int index = static_cast<int>(blockIdx.x) / params.spans;
  const int span = static_cast<int>(blockIdx.x) % params.spans;
  // Causal: the last queries have the most visible keys, so they go first.
  const int tile_of_chunk = CAUSAL ? params.chunk_tiles - 1 - index : index;
  const cukit::IndexerWork work(tile_of_chunk, first_tile, params, cu_seqlens_q, cu_seqlens_kv);
  if (work.rows_left <= 0) return;
  const int seq_kv = work.sequence.seq_kv, causal_offset = work.causal_offset();
  const cukit::TileRange range = work.keys<TILE_N>(settings);
  constexpr int kWhole = KEY_TILE / TILE_N;
  const int last = GRADIENT ? (range.end + kWhole - 1) / kWhole * kWhole : range.end;
  const int begin = span * params.span_tiles;
  const int end = min(begin + params.span_tiles, last);

  const int warp_row = static_cast<int>(threadIdx.x) / cukit::kWarpSize * 16;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x) % cukit::kWarpSize / 4;
  const int lane_column = static_cast<int>(threadIdx.x) % 4 * 2;
  const int row = work.first_row + lane_row;

  const unsigned q_stages = cukit::shared_address(shared);
  const unsigned k_stages = q_stages + 2 * kQueryBytes;
  const int row_of_q = work.sequence.first_q + work.first_row;
  q_t += cukit::offset_of(params.q_t, work.b, row_of_q, 0);
  q_s += cukit::offset_of(params.q_s, work.b, row_of_q, 0);
  k_t += cukit::offset_of(params.k_t, work.b, work.sequence.first_kv, 0);
  k_s += cukit::offset_of(params.k_s, work.b, work.sequence.first_kv, 0);

  // Heads of a tile: the teacher's 0 .. heads_t - 1, then the student's.
  const int heads = params.heads_t + params.heads_s;
  // Each copy recomputes its addresses: addresses kept throughout the loop would occupy registers
  // that the scores need.
  const auto row_stride = [](const cukit::HeadStrides& strides) {
    return static_cast<long long>(static_cast<int>(cukit::opaque(static_cast<unsigned>(strides.row))));
  };
  const auto copy = [&](int tile, int head, int q_stage, int k_stage) {
    const int key = tile * TILE_N;
    if (head < params.heads_t) {
      cukit::copy_head<TILE_M, VALUE_DIM, VALUE_PADDED>(
          q_stages + q_stage * kQueryBytes, q_t + head * params.q_t.head, row_stride(params.q_t),
          work.rows_left, params.teacher_dim);
      if (head % params.group == 0) {
        cukit::copy_head<TILE_N, VALUE_DIM, VALUE_PADDED>(
            k_stages + k_stage * kKeyBytes,
            k_t + head / params.group * params.k_t.head + key * params.k_t.row,
            row_stride(params.k_t),
            seq_kv - key, params.teacher_dim);
      }
    } else {
      const int own = head - params.heads_t;
      cukit::copy_head<TILE_M, HEAD_DIM, PADDED>(
          q_stages + q_stage * kQueryBytes, q_s + own * params.q_s.head, row_stride(params.q_s),
          work.rows_left, params.head_dim);
      if (own == 0) {
        cukit::copy_head<TILE_N, HEAD_DIM, PADDED>(
            k_stages + k_stage * kKeyBytes, k_s + key * params.k_s.row, row_stride(params.k_s),
            seq_kv - key, params.head_dim);
      }
    }
    cukit::cp_async_commit();
  };
  const auto new_keys = [&](int head) {
    return head < params.heads_t ? head % params.group == 0 : head == params.heads_t;
  };
  // For the lane's two rows and a head: minus the teacher's lse in log2 units, or the student's
  // weight.
  const long long teacher_rows =
      cukit::row_statistics(work.b, 0, params.heads_t, work.sequence, settings) + row;
  const long long student_rows =
      cukit::row_statistics(work.b, 0, params.heads_s, work.sequence, settings) + row;
  const long long rows_of_head = VARLEN ? settings.total_q : work.sequence.seq_q;
  const auto read_factors = [&](float(&factors)[2], int head) {
    const bool teacher = head < params.heads_t;
    const float* from = teacher ? lse_t + teacher_rows + head * rows_of_head
                                : head_weights + student_rows + (head - params.heads_t) * rows_of_head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = lane_row + 8 * half < work.rows_left;
      const float own = exists ? from[8 * half] : 0.0f;
      factors[half] = !teacher ? own
                      : exists && own > -cukit::infinity() ? -own * cukit::kLog2E
                                                            : (own == own ? -cukit::infinity() : own);
    }
  };

#if GRADIENT
  float shift[2], inverse[2], weight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shift[half] = weight[half] = inverse[half] = 0.0f;
    if (lane_row + 8 * half >= work.rows_left) continue;
    const long long at = cukit::row_statistics(work.b, 0, 1, work.sequence, settings) + row + 8 * half;
    const float mass = mass_t[at] * static_cast<float>(params.heads_t);
    if (mass == 0.0f) continue;  // no gradient
    shift[half] = -lse_s[at] * cukit::kLog2E;
    inverse[half] = 1.0f / mass;
    weight[half] = cukit::kGradientUnit;
    if (row_weights != nullptr) weight[half] *= row_weights[at];
    if (row_grads != nullptr) weight[half] *= row_grads[at];
  }
#else
  RowSums sums;
#endif

  Scores p, score;
  float factors[2], next_factors[2] = {};
  int q_stage = 0, k_stage = 0;
  if (begin < end) {
    copy(begin, 0, 0, 0);
    read_factors(next_factors, 0);
  }
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    cukit::clear(p);
    cukit::clear(score);
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
      cukit::publish_heads();
      __syncthreads();  // this head has been copied, and no warp reads the other stages any more
      const int next_head = head + 1 < heads ? head + 1 : 0;
      const int next_tile = head + 1 < heads ? tile : tile + 1;
      const int next_k_stage = k_stage ^ static_cast<int>(new_keys(next_head));
      factors[0] = next_factors[0];
      factors[1] = next_factors[1];
      if (next_tile < end) {
        copy(next_tile, next_head, q_stage ^ 1, next_k_stage);
        read_factors(next_factors, next_head);
      }
      Scores x;
      const unsigned char* q_tile = shared + q_stage * kQueryBytes;
      const unsigned char* k_tile = shared + 2 * kQueryBytes + k_stage * kKeyBytes;
      if (head < params.heads_t) {
        cukit::multiply_head<VALUE_DIM>(x, q_tile, k_tile);
#pragma unroll
        for (int n = 0; n < TILE_N / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            p[0][n][i] += exp2f(fmaf(x[0][n][i], params.teacher_scale_log2, factors[i / 2]));
          }
      } else {
        cukit::multiply_head<HEAD_DIM>(x, q_tile, k_tile);
#pragma unroll
        for (int n = 0; n < TILE_N / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float own = x[0][n][i];
            score[0][n][i] = fmaf(own < 0.0f ? 0.0f : own, factors[i / 2], score[0][n][i]);
          }
      }
      q_stage ^= 1;
      k_stage = next_k_stage;
    }

    // The selection's bits, shifted to the lane's first column: 0 for a masked key.
    unsigned bits[2][kWords];
#if SELECTED
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        bits[half][word] = selected[(work.scratch + lane_row + 8 * half) * (params.scratch_row / 32) +
                                    tile * kWords + word] >> lane_column;
      }
#endif
    const bool unmasked = !SELECTED && range.unmasked(tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const cukit::Span visible =
          cukit::visible_keys(row + 8 * half, causal_offset, seq_kv, settings);
      const int visible_end = visible.end - tile * TILE_N - lane_column;
#pragma unroll
      for (int n = 0; n < TILE_N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * n + i;
          float& own = p[0][n][2 * half + i];
          float& u = score[0][n][2 * half + i];
          bool masked = !unmasked && column >= visible_end;
#if SELECTED
          masked |= (bits[half][column / 32] >> (column % 32) & 1) == 0;
#endif
          u = masked ? kMaskedScore : u * params.scale_log2;
          own = masked ? 0.0f : own;
        }
    }
#if GRADIENT
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* to = derivatives + (work.scratch + lane_row + 8 * half) * params.scratch_row +
              tile * TILE_N + lane_column;
#pragma unroll
      for (int n = 0; n < TILE_N / 8; ++n) {
        float d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float q = exp2f(score[0][n][2 * half + i] + shift[half]);
          d[i] = weight[half] == 0.0f
                     ? 0.0f
                     : weight[half] * (q - p[0][n][2 * half + i] * inverse[half]);
        }
        *reinterpret_cast<unsigned*>(to + 8 * n) = cukit::pack<T>(d[0], d[1]);
      }
    }
#else
    sums.add(cukit::flat(p[0]), cukit::flat(score[0]));
#endif
  }
#if !GRADIENT
  const long long rows = static_cast<long long>(params.chunk_tiles) * TILE_M;
  sums.write(partials + span * kStatistics * rows + work.scratch + lane_row, rows);
#endif
}

#if !GRADIENT
extern "C" __global__ void __launch_bounds__(TILE_M) indexer_kl_rows(
    const float* __restrict__ partials,  // [spans, kStatistics, chunk rows]
    float* __restrict__ kl,              // [batch, seq_q]; VARLEN: [total_q]
    float* __restrict__ lse_s,           // as kl, or null
    float* __restrict__ mass_t,          // as kl, or null
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
    const __grid_constant__ cukit::IndexerParameters params, int first_tile) {
  const cukit::IndexerWork work(blockIdx.x, first_tile, params, cu_seqlens_q, cu_seqlens_kv);
  if (static_cast<int>(threadIdx.x) >= work.rows_left) return;
  const long long rows = static_cast<long long>(params.chunk_tiles) * TILE_M;
  float max = kNoScore, sum = 0.0f, entropy = 0.0f, cross = 0.0f, mass = 0.0f;
  for (int span = 0; span < params.spans; ++span) {
    const float* from = partials + span * kStatistics * rows + work.scratch + threadIdx.x;
    const float top = fmaxf(max, from[0]);
    sum = sum * exp2f(max - top) + from[rows] * exp2f(from[0] - top);
    max = top;
    entropy += from[2 * rows];
    cross += from[3 * rows];
    mass += from[4 * rows];
  }
  const float top = max + log2f(sum);
  float value = ((entropy - cross) / mass - log2f(mass) + top) * cukit::kLn2;
  // 0 for a row without visible keys, and for a negative rounding error near 0. NaN is kept.
  if (mass == 0.0f || value < 0.0f) value = 0.0f;
  const long long row = cukit::row_statistics(work.b, 0, 1, work.sequence, params.settings) +
                        work.first_row + threadIdx.x;
  kl[row] = value;
  if (lse_s != nullptr) lse_s[row] = sum == 0.0f ? -cukit::infinity() : top * cukit::kLn2;
  if (mass_t != nullptr) mass_t[row] = mass / static_cast<float>(params.heads_t);
}
#endif
