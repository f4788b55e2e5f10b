// Gradients of a gated linear recurrence, chunk by chunk from the last to the first on Hopper's tensor cores.
// Equations: see gated_scan_backward_sm80.cu.
//
// Papers: Dao and Gu, arXiv:2405.21060; Yang et al., arXiv:2312.06635.
//
// Mapping: grid (segment, column tile, sequence * num_heads + head); a block is one warpgroup, which iterates
//   over the chunks of 64 tokens of its segment, from the last to the first. g, the gradient of the state after a
//   chunk, stays in registers as floats and is rounded to shared memory for the products that read it. Per chunk,
//   with D the gradients of outputs, e the decay between two tokens, 64 columns of dc and db at a time:
//
//     S  = C B^T,  V = D X^T              e S and e V rounded to shared memory; sums for the decays
//     dc = exp(s) (D h^T) + (e V) B
//     db = exp(s_last - s) (X g^T) + (e V)^T C
//     dx = exp(s_last - s) (B g) + (e S)^T D
//     g  = exp(s_last) g + C^T D',        D'_i = exp(s_i) d_i
//
// Shared memory, in parts of 64 columns with a 128-byte swizzle: 64 x STATE_TILE keys and as many queries, 64 x 64
//   values and as many gradients of outputs, STATE_TILE x 64 state | STATE_TILE x 64 of g | e S | e V | D', 64 x 64
//   each, all of 2 bytes, dynamic; 8 x 64 + 4 floats static. One stage: copies of one block overlap the products of
//   another on the same SM.
// CHANNELS: a decay per row of the state. gated_scan_channels.cu has decayed queries, keys and scores; only g is
//   decayed here, and gated_scan_channels_backward.cu computes dc, db and the decays' gradients from V,
//   D h^T, X g^T and the rows of <g, h>, which are the results here.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; CHANNELS 0|1; PADDED 0|1: state_dim or
//   head_dim is not a multiple of its tile (both are of 8); THREADS 128.
// Architecture: sm_90 (sm_90a) only. Accumulates in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_backward.
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
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
static_assert(THREADS == cukit::kWarpgroupThreads, "one warpgroup");

using KeyTile = cukit::SharedTile<T, kChunk, STATE_TILE>;
using ValueTile = cukit::SharedTile<T, kChunk, kColumns>;
using StateTile = cukit::SharedTile<T, STATE_TILE, kColumns>;
using ScoreTile = cukit::SharedTile<T, kChunk, kChunk>;
using Rows = cukit::StateRows<STATE_TILE>;
using Decay = cukit::StateDecay<Rows, CHANNELS>;

constexpr int kKeyAccumulators = 32;  // per thread, of 64 x 64
constexpr int kValueAccumulators = kColumns / 2;

// Sums of a chunk's products per token, and <g, h>: the terms of the decays' gradients.
struct Sums {
  float rows[kChunk];             // row sums of scores
  float columns[kWarps][kChunk];  // column sums of scores, per 16 rows
  float read[kChunk];             // c . h d
  float written[kChunk];          // b . g x
  float passing[kWarps];          // <g, h>
};

struct Tiles {
  unsigned char *keys, *queries, *values, *grads, *state, *g, *scores, *grad_scores, *scaled;

  CUKIT_DEVICE explicit Tiles(unsigned char* memory)
      : keys(memory),
        queries(keys + KeyTile::kBytes),
        values(queries + KeyTile::kBytes),
        grads(values + ValueTile::kBytes),
        state(grads + ValueTile::kBytes),
        g(state + StateTile::kBytes),
        scores(g + StateTile::kBytes),
        grad_scores(scores + ScoreTile::kBytes),
        scaled(grad_scores + ScoreTile::kBytes) {}
};

// Loads two adjacent elements of a tile whose parts have `Rows` rows.
template <int Rows>
CUKIT_DEVICE void pair_at(float (&to)[2], const unsigned char* tile, int row, int column) {
  const unsigned at = column / 64 * (Rows * 128) + cukit::Swizzle<64>::offset(row, column % 64 / 8) +
                      2 * (column % 8);
  cukit::unpack<T>(to, *reinterpret_cast<const unsigned*>(tile + at));
}

// Scales a lane's two rows of accumulators.
template <int N>
CUKIT_DEVICE void scale_rows(float (&acc)[N], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) acc[i] *= by[i / 2 % 2];
}

// Stores to to[row] (`more`: adds) the dot product of rows of accumulators with 64 columns of keys or queries.
template <int N>
CUKIT_DEVICE void dot_rows(float* to, bool more, const float (&acc)[N], const unsigned char* tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = cukit::accumulator_row() + 8 * half;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      float pair[2];
      pair_at<kChunk>(pair, tile, row, 8 * n + cukit::accumulator_column());
      sum = fmaf(acc[4 * n + 2 * half], pair[0], sum);
      sum = fmaf(acc[4 * n + 2 * half + 1], pair[1], sum);
    }
    sum = cukit::warp_reduce<cukit::Sum, 4>(sum);
    if (threadIdx.x % 4 == 0) to[row] = more ? to[row] + sum : sum;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_scan_backward(
    const T* __restrict__ grad_y,           // [tokens, num_heads, head_dim]
    const T* __restrict__ x,                // [tokens, num_heads, head_dim]
    const T* __restrict__ b,                // [tokens, num_groups, state_dim]
    const T* __restrict__ c,                // [tokens, num_groups, state_dim]
    const float* __restrict__ log_decay,    // [tokens, num_heads]; with CHANNELS sums of each chunk, log2,
                                            // [slots, num_heads, state_dim]
    const int* __restrict__ cu_seqlens,     // [num_sequences + 1] or null: seq_len each
    const T* __restrict__ chunk_states,     // [slots, num_heads, state_dim, head_dim], before each chunk
    const T* __restrict__ scores,           // [slots, num_heads, 64, 64], decayed, with CHANNELS
    const float* __restrict__ grad_states,  // [num_sequences, segments, num_heads, state_dim, head_dim], after
                                            // each segment, or null
    T* __restrict__ grad_x,                 // [tokens, num_heads, head_dim]
    T* __restrict__ grad_b,                 // [tokens, num_heads, column tiles, state_dim]
    T* __restrict__ grad_c,                 // [tokens, num_heads, column tiles, state_dim]
    float* __restrict__ grad_decay,         // [tokens, num_heads, column tiles]; with CHANNELS
                                            // exp(s_last) <g, h>, [slots, num_heads, column tiles, state_dim]
    T* __restrict__ grad_scores,            // [slots, num_heads, column tiles, 64, 64], with CHANNELS
    float* __restrict__ grad_initial,       // [num_sequences, num_heads, state_dim, head_dim]
    const __grid_constant__ cukit::ScanParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  __shared__ float decays[kChunk];
  __shared__ Sums sums;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const cukit::ScanWork work(p, cu_seqlens, 0);
  const int column = work.column, columns = work.columns, length = work.length;

  const long long value_stride = static_cast<long long>(p.num_heads) * p.head_dim;
  const long long key_stride = static_cast<long long>(p.num_groups) * p.state_dim;
  const int tiles = static_cast<int>(gridDim.y);
  const long long part_stride = static_cast<long long>(p.num_heads) * tiles * p.state_dim;
  const int part = work.head * tiles + static_cast<int>(blockIdx.y);
  const long long value_at = work.begin * value_stride + work.head * p.head_dim + column;
  const long long key_at = work.begin * key_stride + work.group * p.state_dim;
  const long long part_at = work.begin * part_stride + static_cast<long long>(part) * p.state_dim;
  const long long state_size = static_cast<long long>(p.state_dim) * p.head_dim;
  if constexpr (!CHANNELS) log_decay += work.begin * p.num_heads + work.head;

  const Tiles whole(memory);
  using Values = cukit::TileCopy<kChunk, kColumns, THREADS, PADDED>;
  using States = cukit::TileCopy<STATE_TILE, kColumns, THREADS, PADDED>;
  const auto start = [&](int chunk) {
    const int token = chunk * kChunk;
    const int rows = length - token;
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(cukit::shared_address(whole.keys),
                                                    b + key_at + token * key_stride, key_stride, rows,
                                                    p.state_dim);
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(cukit::shared_address(whole.queries),
                                                    c + key_at + token * key_stride, key_stride, rows,
                                                    p.state_dim);
    Values::start(cukit::shared_address(whole.values), x + value_at + token * value_stride, value_stride, rows,
                  columns);
    Values::start(cukit::shared_address(whole.grads), grad_y + value_at + token * value_stride, value_stride,
                  rows, columns);
    States::start(cukit::shared_address(whole.state),
                  chunk_states + work.chunk_place(p, chunk) * state_size + column, p.head_dim, p.state_dim,
                  columns);
    if constexpr (CHANNELS) {
      cukit::TileCopy<kChunk, kChunk, THREADS, false>::start(
          cukit::shared_address(whole.scores), scores + work.chunk_place(p, chunk) * (kChunk * kChunk),
          kChunk, kChunk, kChunk);
    }
  };

  float g[Rows::kTiles][kValueAccumulators];
#pragma unroll
  for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
    for (float& value : g[m]) value = 0.0f;
  const Rows state_rows;
  if (grad_states != nullptr) {
    const float* from = grad_states + work.place(p) * state_size;
    state_rows.each(g, p, column, [&](float& value, int at) { value = from[at]; });
  }

  const cukit::ChunkDecays decay{decays};  // computed by warp 1
  const int row = cukit::accumulator_row(), first_column = cukit::accumulator_column();
  float own[2];
  if (work.first < work.end) {
    start(work.end - 1);
    if (!CHANNELS && warp == 1) {
      cukit::read_decays(own, log_decay, p.num_heads, work.end - 1, length);
      decay.scan(own);
    }
    state_rows.template round<T>(whole.g, g);
  }
  cukit::cp_async_commit();

#pragma unroll 1
  for (int chunk = work.end - 1; chunk >= work.first; --chunk) {
    const bool more = chunk > work.first;
    cukit::cp_async_wait<0>();
    cukit::fence_proxy_async();  // for the copied tiles and the rounded g
    __syncthreads();
    // Opaque, so that the compiler does not keep addresses within the tiles in registers across chunks.
    const Tiles tile(memory + cukit::opaque(0));
    const int token = chunk * kChunk;
    const bool exists[2] = {token + row < length, token + row + 8 < length};

    float score[kChunk / 2], grad[kChunk / 2];
    cukit::wgmma_fence();
    if constexpr (!CHANNELS) {
#pragma unroll
      for (int k = 0; k < KeyTile::kSteps; ++k) {
        cukit::wgmma<T, kChunk>(score, KeyTile::k_major(tile.queries) + KeyTile::k_step(k),
                                KeyTile::k_major(tile.keys) + KeyTile::k_step(k), k > 0);
      }
    }
#pragma unroll
    for (int k = 0; k < ValueTile::kSteps; ++k) {
      cukit::wgmma<T, kChunk>(grad, ValueTile::k_major(tile.grads) + ValueTile::k_step(k),
                              ValueTile::k_major(tile.values) + ValueTile::k_step(k), k > 0);
    }
    cukit::wgmma_commit();

    Decay last;
    const long long slot = work.chunk_place(p, chunk);
    float upto[2], grown[2], left[2];  // decay up to the lane's rows, and from there to the end of the chunk
    if constexpr (CHANNELS) {
      last.read(log_decay + slot * p.state_dim, state_rows, p.state_dim);
    } else {
      if (more && warp == 1) cukit::read_decays(own, log_decay, p.num_heads, chunk - 1, length);
      cukit::scale_values<T, THREADS>(tile.scaled, tile.grads, [&](int i) { return exp2f(decay.upto[i]); });
      last.sums[0][0] = decay.last();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        upto[half] = decay.upto[row + 8 * half];
        grown[half] = exp2f(upto[half]);
        left[half] = exp2f(last.sums[0][0] - upto[half]);
      }
    }

    float row_sum[2] = {};
    if constexpr (!CHANNELS) cukit::wgmma_wait<0>(score);
    cukit::wgmma_wait<0>(grad);
    if constexpr (CHANNELS) {
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float causal[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            causal[i] = 8 * n + first_column + i <= row + 8 * half ? grad[4 * n + 2 * half + i] : 0.0f;
          }
          const unsigned to = cukit::Swizzle<kChunk>::offset(row + 8 * half, n) + 2 * first_column;
          *reinterpret_cast<unsigned*>(tile.grad_scores + to) = cukit::pack<T>(causal[0], causal[1]);
        }
    } else {
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const int first_key = 8 * n + first_column;
        const float key_upto[2] = {decay.upto[first_key], decay.upto[first_key + 1]};
        float column_sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float decayed[2], decayed_grad[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const bool causal = first_key + i <= row + 8 * half;
            const float between = causal ? exp2f(upto[half] - key_upto[i]) : 0.0f;
            const float raw = score[4 * n + 2 * half + i];
            decayed[i] = causal ? raw * between : 0.0f;
            decayed_grad[i] = causal ? grad[4 * n + 2 * half + i] * between : 0.0f;
            const float product = first_key + i < row + 8 * half ? raw * decayed_grad[i] : 0.0f;
            row_sum[half] += product;
            column_sum[i] += product;
          }
          const unsigned to = cukit::Swizzle<kChunk>::offset(row + 8 * half, n) + 2 * first_column;
          *reinterpret_cast<unsigned*>(tile.scores + to) = cukit::pack<T>(decayed[0], decayed[1]);
          *reinterpret_cast<unsigned*>(tile.grad_scores + to) =
              cukit::pack<T>(decayed_grad[0], decayed_grad[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int distance = 4; distance < kWarpSize; distance *= 2) {
            column_sum[i] += __shfl_xor_sync(cukit::kFullMask, column_sum[i], distance);
          }
          if (lane < 4) sums.columns[warp][first_key + i] = column_sum[i];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[half] = cukit::warp_reduce<cukit::Sum, 4>(row_sum[half]);
        if (lane % 4 == 0) sums.rows[row + 8 * half] = row_sum[half];
      }
    }
    cukit::fence_proxy_async();  // for the scores and scaled gradients
    __syncthreads();

    if constexpr (CHANNELS) {
      T* const to = grad_scores + (slot * tiles + blockIdx.y) * (kChunk * kChunk);
      cukit::store_tile<kChunk, kChunk, THREADS, false>(to, kChunk, tile.grad_scores, 0, kChunk, kChunk, threadIdx.x);
    }

    // 64 columns of dc and db at a time, because g occupies registers.
    const long long key_row = part_at + (token + row) * part_stride;
#pragma unroll 1
    for (int part = 0; part < KeyTile::kParts; ++part) {
      float of_queries[kKeyAccumulators], of_keys[kKeyAccumulators];
      const unsigned long long states = part * StateTile::rows(64), keys = part * KeyTile::kPart;
      cukit::wgmma_fence();
#pragma unroll
      for (int k = 0; k < ValueTile::kSteps; ++k) {
        cukit::wgmma<T, 64>(of_queries, ValueTile::k_major(tile.grads) + ValueTile::k_step(k),
                            StateTile::k_major(tile.state) + states + StateTile::k_step(k), k > 0);
      }
      cukit::wgmma_commit();
#pragma unroll
      for (int k = 0; k < ValueTile::kSteps; ++k) {
        cukit::wgmma<T, 64>(of_keys, ValueTile::k_major(tile.values) + ValueTile::k_step(k),
                            StateTile::k_major(tile.g) + states + StateTile::k_step(k), k > 0);
      }
      cukit::wgmma_commit();
      if constexpr (!CHANNELS) {
        cukit::wgmma_wait<1>(of_queries);
        scale_rows(of_queries, grown);
        dot_rows(sums.read, part > 0, of_queries, tile.queries + part * KeyTile::kPartBytes);
        cukit::wgmma_wait<0>(of_keys);
        scale_rows(of_keys, left);
        dot_rows(sums.written, part > 0, of_keys, tile.keys + part * KeyTile::kPartBytes);

        cukit::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
          cukit::wgmma<T, 64, false, true>(of_queries,
                                           ScoreTile::k_major(tile.grad_scores) + ScoreTile::k_step(k),
                                           KeyTile::mn_major(tile.keys) + keys + KeyTile::mn_step(k), true);
        }
        cukit::wgmma_commit();
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
          cukit::wgmma<T, 64, true, true>(of_keys,
                                          ScoreTile::mn_major(tile.grad_scores) + ScoreTile::mn_step(k),
                                          KeyTile::mn_major(tile.queries) + keys + KeyTile::mn_step(k), true);
        }
        cukit::wgmma_commit();
      }
      const int first = 64 * part;
      cukit::ResultRows<T> target{{1.0f, 1.0f},
                                  {exists[0], exists[1]},
                                  grad_c + key_row + first,
                                  part_stride,
                                  p.state_dim - first};
      cukit::wgmma_wait<1>(of_queries);
      cukit::write_rows<PADDED>(of_queries, target);
      target.first = grad_b + key_row + first;
      cukit::wgmma_wait<0>(of_keys);
      cukit::write_rows<PADDED>(of_keys, target);
    }

    float of_values[kValueAccumulators];
    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < KeyTile::kSteps; ++k) {
      cukit::wgmma<T, kColumns, false, true>(of_values, KeyTile::k_major(tile.keys) + KeyTile::k_step(k),
                                             StateTile::mn_major(tile.g) + StateTile::mn_step(k), k > 0);
    }
    cukit::wgmma_commit();

    // <g, h>, per row with CHANNELS
    const Decay kept = last.factors();
    float passing = 0.0f;
    [[maybe_unused]] float passing_rows[Rows::kTiles][2] = {};
#pragma unroll
    for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float pair[2];
          pair_at<STATE_TILE>(pair, tile.state, row + 64 * m + 8 * half, 8 * n + first_column);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = g[m][4 * n + 2 * half + i];
            value *= kept.at(m, half);
            float& sum = CHANNELS ? passing_rows[m][half] : passing;
            sum = fmaf(value, pair[i], sum);
          }
        }
    if constexpr (CHANNELS) {
      Decay sums_of_rows;
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums_of_rows.sums[m][half] = cukit::warp_reduce<cukit::Sum, 4>(passing_rows[m][half]);
        }
      sums_of_rows.write(grad_decay + (slot * tiles + blockIdx.y) * p.state_dim, state_rows, p.state_dim);
    } else {
      passing = cukit::warp_reduce<cukit::Sum>(passing);
      if (lane == 0) sums.passing[warp] = passing;
    }
    cukit::wgmma_wait<0>(of_values);
    if constexpr (!CHANNELS) scale_rows(of_values, left);

    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      cukit::wgmma<T, kColumns, true, true>(of_values, ScoreTile::mn_major(tile.scores) + ScoreTile::mn_step(k),
                                            ValueTile::mn_major(tile.grads) + ValueTile::mn_step(k), true);
    }
    cukit::wgmma_commit();
#pragma unroll
    for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        cukit::wgmma<T, kColumns, true, true>(
            g[m], KeyTile::mn_major(tile.queries) + m * KeyTile::kPart + KeyTile::mn_step(k),
            ValueTile::mn_major(CHANNELS ? tile.grads : tile.scaled) + ValueTile::mn_step(k), true);
      }
    cukit::wgmma_commit();
    cukit::wgmma_wait<1>(of_values);
    const cukit::ResultRows<T> to_values{{1.0f, 1.0f},
                                         {exists[0], exists[1]},
                                         grad_x + value_at + (token + row) * value_stride,
                                         value_stride,
                                         columns};
    cukit::write_rows<PADDED>(of_values, to_values);
#pragma unroll
    for (int m = 0; m < Rows::kTiles; ++m) cukit::wgmma_wait<0>(g[m]);
    __syncthreads();  // all products have read the tiles, and the sums are visible

    if (more) {
      start(chunk - 1);
      state_rows.template round<T>(tile.g, g);
      if (!CHANNELS && warp == 1) decay.scan(own);
    }
    cukit::cp_async_commit();
    if (!CHANNELS && warp == 0) {
      float change[2], total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * lane + i;
        float begins = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) begins += sums.columns[w][at];
        change[i] = begins - sums.rows[at] + sums.written[at] - sums.read[at];
        total += sums.read[at];
      }
      total = cukit::warp_reduce<cukit::Sum>(total);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums.passing[w];
      cukit::write_decay_gradients(grad_decay + (work.begin * p.num_heads * tiles + part), change, total,
                                   log_decay, token, length, p.num_heads, tiles);
    }
  }
  cukit::cp_async_wait<0>();

  if (work.segment == 0) {
    float* to = grad_initial +
                (static_cast<long long>(work.sequence) * p.num_heads + work.head) * state_size;
    state_rows.each(g, p, column, [&](float& value, int at) { to[at] = value; });
  }
}
