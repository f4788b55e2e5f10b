// Gradients of a gated linear recurrence, chunk by chunk from the last to the first, with wgmma.
// Equations: see gated_scan_backward_sm80.cu.
//
// Papers: Dao and Gu, arXiv:2405.21060; Yang et al., arXiv:2312.06635.
//
// Mapping: grid (segment, column tile, sequence * heads + head of the launch). A block of two warpgroups iterates over
//   the chunks of 64 tokens of its segment, from the last to the first. g, the gradient of the state after a chunk,
//   stays in registers as floats and is rounded to shared memory for the products that read it. Per chunk, with D
//   the gradients of outputs and e the decay between two tokens:
//
//     S  = C B^T,  V = D X^T              e S and e V rounded to shared memory; sums for the decays
//     dc = exp(s) (D h^T) + (e V) B
//     db = exp(s_last - s) (X g^T) + (e V)^T C
//     dx = exp(s_last - s) (B g) + (e S)^T D
//     g  = exp(s_last) g + C^T D',        D'_i = exp(s_i) d_i
//
//   The first warpgroup computes dc and the second db, 64 columns at a time; each computes 32
//   columns of S, V and dx, and 64 rows of g, or 32 columns of g if STATE_TILE is 64.
// Shared memory, in parts of 64 columns with a 128-byte swizzle, dynamic, all of 2 bytes: keys and
//   queries, 64 x STATE_TILE each; values and gradients of outputs, 64 x 64 each; state and g,
//   STATE_TILE x 64 each; e S, e V and D', 64 x 64 each. Static: 9 x 64 + 8 floats. One stage:
//   copies of one block overlap the products of another block on the same SM.
// Programmatic dependent launch: the first copies of the inputs are issued before the wait for the
//   kernels that compute the states and their gradients.
// CHANNELS: a decay per row of the state. gated_scan_channels.cu has already decayed queries, keys
//   and scores; only g is decayed here. Besides dx and the gradient of the initial state, the
//   results are V, D h^T, X g^T and <g, h> per row of the state, from which
//   gated_scan_channels_backward.cu computes dc, db and the gradients of the decays.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; CHANNELS 0|1; PADDED 0|1:
//   state_dim or head_dim is not a multiple of its tile (both are multiples of 8); THREADS 256.
// Architecture: sm_90 (sm_90a) only. Accumulates in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_backward.
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"
#include "sequence/chunks.cuh"
#include "sequence/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::kChunk;
using cukit::kWarpSize;

constexpr int kColumns = cukit::kHeadColumns;
constexpr int kWarps = THREADS / kWarpSize;
constexpr int kGroups = 2;
// Whether values and state of the next chunk are copied during the last products of this chunk.
// This takes another barrier, which with STATE_TILE 64 costs more than the overlap saves.
constexpr bool kEarly = STATE_TILE == 128;
constexpr int kShare = kChunk / kGroups;  // columns of S, V and dx per warpgroup
static_assert(THREADS == kGroups * cukit::kWarpgroupThreads, "two warpgroups");
static_assert(kShare == kColumns / kGroups, "a chunk has kColumns tokens");

using KeyTile = cukit::SharedTile<T, kChunk, STATE_TILE>;
using ValueTile = cukit::SharedTile<T, kChunk, kColumns>;
using StateTile = cukit::SharedTile<T, STATE_TILE, kColumns>;
using ScoreTile = cukit::SharedTile<T, kChunk, kChunk>;
using Rows = cukit::StateRows<STATE_TILE, kGroups>;
using Decay = cukit::StateDecay<Rows, CHANNELS>;
static_assert(Rows::kTiles == 1, "64 rows of g per warpgroup");

constexpr int kShareStep = kShare * 2 / 16;  // descriptor offset of kShare columns of an MN-major tile

// Sums of a chunk's products per token, and <g, h>: the terms of the gradients of the decays.
struct Sums {
  float rows[kGroups][kChunk];  // row sums of scores, per warpgroup's columns
  float columns[4][kChunk];     // column sums of scores, per 16 rows
  float read[kChunk];           // c . h d
  float written[kChunk];        // b . g x
  float passing[kWarps];        // <g, h>
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

// Stores the dot product of each row of accumulators with 64 columns of keys or queries in to[row];
// `more`: adds to it instead.
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

// The gradients of a chunk's queries or keys, by one warpgroup, 64 columns at a time:
//   queries: exp(s) (D h^T) + (e V) B           keys: exp(s_last - s) (X g^T) + (e V)^T C
//   that is: by (rows states^T) + scores others
// by: the factors of a lane's two rows; rows: D or X; states: h or g; own: queries or keys; others:
// keys or queries; Transposed: takes scores^T. Stores the dot product of each row of the first term
// with the row of `own` in `dots`. With CHANNELS only the first term, without factors.
template <bool Transposed>
CUKIT_DEVICE void key_gradients(const cukit::ResultRows<T>& target, float* dots, const unsigned char* rows,
                                const unsigned char* states, const unsigned char* own,
                                const unsigned char* others, const unsigned char* scores, const float (&by)[2]) {
  const unsigned long long score_rows = Transposed ? ScoreTile::mn_major(scores) : ScoreTile::k_major(scores);
#pragma unroll 1
  for (int part = 0; part < KeyTile::kParts; ++part) {
    float out[32];
    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < ValueTile::kSteps; ++k) {
      cukit::wgmma<T, 64>(out, ValueTile::k_major(rows) + ValueTile::k_step(k),
                          StateTile::k_major(states) + part * StateTile::rows(64) + StateTile::k_step(k), k > 0);
    }
    cukit::wgmma_commit();
    if constexpr (!CHANNELS) {
      cukit::wgmma_wait<0>(out);
      scale_rows(out, by);
      dot_rows(dots, part > 0, out, own + part * KeyTile::kPartBytes);
      cukit::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        cukit::wgmma<T, 64, Transposed, true>(
            out, score_rows + (Transposed ? ScoreTile::mn_step(k) : ScoreTile::k_step(k)),
            KeyTile::mn_major(others) + part * KeyTile::kPart + KeyTile::mn_step(k), true);
      }
      cukit::wgmma_commit();
    }
    cukit::ResultRows<T> to = target;
    to.first += 64 * part;
    to.columns -= 64 * part;
    cukit::wgmma_wait<0>(out);
    cukit::write_rows<PADDED>(out, to);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_scan_backward(
    const T* __restrict__ grad_y,           // [tokens, num_heads, head_dim]
    const T* __restrict__ x,                // [tokens, num_heads, head_dim]
    const T* __restrict__ b,                // [tokens, num_groups, state_dim]
    const T* __restrict__ c,                // [tokens, num_groups, state_dim]
    const float* __restrict__ log_decay,    // [tokens, num_heads]; with CHANNELS sums of each chunk, log2,
                                            // [slots, heads, state_dim]
    const int* __restrict__ cu_seqlens,     // [num_sequences + 1] or null: seq_len each
    const T* chunk_states,                  // [slots, heads, state_dim, head_dim], before each chunk
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
  const int lane = threadIdx.x % kWarpSize, warp = cukit::warp_uniform(threadIdx.x / kWarpSize);
  const int group = warp / 4;
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

  const Tiles whole(memory);
  using Values = cukit::TileCopy<kChunk, kColumns, THREADS, PADDED>;
  using States = cukit::TileCopy<STATE_TILE, kColumns, THREADS, PADDED>;
  const auto start_tokens = [&](int chunk) {
    const int token = chunk * kChunk;
    const int rows = length - token;
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(cukit::shared_address(whole.keys),
                                                    b + key_at + token * key_stride, key_stride, rows,
                                                    p.state_dim);
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(cukit::shared_address(whole.queries),
                                                    c + key_at + token * key_stride, key_stride, rows,
                                                    p.state_dim);
    Values::start(cukit::shared_address(whole.grads), grad_y + value_at + token * value_stride, value_stride,
                  rows, columns);
    if constexpr (CHANNELS) {
      cukit::TileCopy<kChunk, kChunk, THREADS, false>::start(
          cukit::shared_address(whole.scores), scores + work.chunk_place(p, chunk) * (kChunk * kChunk),
          kChunk, kChunk, kChunk);
    }
  };
  const auto start_state = [&](int chunk) {
    const int token = chunk * kChunk;
    Values::start(cukit::shared_address(whole.values), x + value_at + token * value_stride, value_stride,
                  length - token, columns);
    States::start(cukit::shared_address(whole.state),
                  chunk_states + work.chunk_place(p, chunk) * state_size + column, p.head_dim, p.state_dim,
                  columns);
  };

  float g[Rows::kTiles][4 * Rows::kColumnTiles];
#pragma unroll
  for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
    for (float& value : g[m]) value = 0.0f;
  const Rows state_rows;
  const cukit::ChunkDecays decay{decays};  // computed by warp 1
  const int row = cukit::accumulator_row(), first_column = cukit::accumulator_column();
  float own[2];
  const bool works = work.first < work.end;
  if (works) {
    start_tokens(work.end - 1);
    if (!CHANNELS && warp == 1) {
      cukit::read_decays(own, log_decay, p.num_heads, work.end - 1, length);
      decay.scan(own);
    }
  }
  cukit::wait_for_previous_grids();
  if (works) start_state(work.end - 1);
  cukit::cp_async_commit();
  if (grad_states != nullptr) {
    const float* from = grad_states + work.place(p) * state_size;
    state_rows.each(g, p, column, [&](float& value, int at) { value = from[at]; });
  }
  if (works) state_rows.template round<T>(whole.g, g);

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

    float score[kShare / 2], grad[kShare / 2];
    cukit::wgmma_fence();
    if constexpr (!CHANNELS) {
#pragma unroll
      for (int k = 0; k < KeyTile::kSteps; ++k) {
        cukit::wgmma<T, kShare>(score, KeyTile::k_major(tile.queries) + KeyTile::k_step(k),
                                KeyTile::k_major(tile.keys) + group * KeyTile::rows(kShare) + KeyTile::k_step(k),
                                k > 0);
      }
    }
#pragma unroll
    for (int k = 0; k < ValueTile::kSteps; ++k) {
      cukit::wgmma<T, kShare>(
          grad, ValueTile::k_major(tile.grads) + ValueTile::k_step(k),
          ValueTile::k_major(tile.values) + group * ValueTile::rows(kShare) + ValueTile::k_step(k), k > 0);
    }
    cukit::wgmma_commit();

    Decay last;
    const long long slot = work.chunk_place(p, chunk);
    float cumsum[2];                 // at the lane's rows
    float from_start[2], to_end[2];  // decays: chunk's start to these rows, these rows to its end
    if constexpr (CHANNELS) {
      last.read(log_decay + slot * p.state_dim, state_rows, p.state_dim);
    } else {
      if (more && warp == 1) cukit::read_decays(own, log_decay, p.num_heads, chunk - 1, length);
      cukit::scale_values<T, THREADS>(tile.scaled, tile.grads, [&](int i) { return exp2f(decay.cumsum[i]); });
      last.sums[0][0] = decay.last();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cumsum[half] = decay.cumsum[row + 8 * half];
        from_start[half] = exp2f(cumsum[half]);
        to_end[half] = exp2f(decay.last() - cumsum[half]);
      }
    }

    // <g, h>, per row with CHANNELS
    float passing[1][2] = {};
    state_rows.template scale_and_dot<T>(g, passing, last.factors(), tile.state);
    if constexpr (CHANNELS) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float whole = cukit::warp_reduce<cukit::Sum, 4>(passing[0][half]);
        if (lane % 4 == 0) (group == 0 ? sums.read : sums.written)[row + 8 * half] = whole;
      }
    } else {
      const float whole = cukit::warp_reduce<cukit::Sum>(passing[0][0] + passing[0][1]);
      if (lane == 0) sums.passing[warp] = whole;
    }

    float row_sum[2] = {};
    if constexpr (!CHANNELS) cukit::wgmma_wait<0>(score);
    cukit::wgmma_wait<0>(grad);
    if constexpr (CHANNELS) {
#pragma unroll
      for (int n = 0; n < kShare / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float causal[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const bool counts = kShare * group + 8 * n + first_column + i <= row + 8 * half;
            causal[i] = counts ? grad[4 * n + 2 * half + i] : 0.0f;
          }
          const unsigned to =
              cukit::Swizzle<kChunk>::offset(row + 8 * half, kShare / 8 * group + n) + 2 * first_column;
          *reinterpret_cast<unsigned*>(tile.grad_scores + to) = cukit::pack<T>(causal[0], causal[1]);
        }
    } else {
#pragma unroll
      for (int n = 0; n < kShare / 8; ++n) {
        const int first_key = kShare * group + 8 * n + first_column;
        const float key_cumsum[2] = {decay.cumsum[first_key], decay.cumsum[first_key + 1]};
        float column_sum[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float decayed[2], decayed_grad[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const bool causal = first_key + i <= row + 8 * half;
            const float between = causal ? exp2f(cumsum[half] - key_cumsum[i]) : 0.0f;
            const float raw = score[4 * n + 2 * half + i];
            decayed[i] = causal ? raw * between : 0.0f;
            decayed_grad[i] = causal ? grad[4 * n + 2 * half + i] * between : 0.0f;
            const float product = first_key + i < row + 8 * half ? raw * decayed_grad[i] : 0.0f;
            row_sum[half] += product;
            column_sum[i] += product;
          }
          const unsigned to = cukit::Swizzle<kChunk>::offset(row + 8 * half, kShare / 8 * group + n) + 2 * first_column;
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
          if (lane < 4) sums.columns[warp % 4][first_key + i] = column_sum[i];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[half] = cukit::warp_reduce<cukit::Sum, 4>(row_sum[half]);
        if (lane % 4 == 0) sums.rows[group][row + 8 * half] = row_sum[half];
      }
    }
    cukit::fence_proxy_async();  // for the scores and scaled gradients
    __syncthreads();

    if constexpr (CHANNELS) {
      T* const to = grad_scores + (slot * tiles + blockIdx.y) * (kChunk * kChunk);
      cukit::store_tile<kChunk, kChunk, THREADS, false>(to, kChunk, tile.grad_scores, 0, kChunk, kChunk, threadIdx.x);
    }
    const cukit::ResultRows<T> to_keys{{1.0f, 1.0f},
                                       {exists[0], exists[1]},
                                       (group == 0 ? grad_c : grad_b) + part_at + (token + row) * part_stride,
                                       part_stride,
                                       p.state_dim};
    if (group == 0) {
      key_gradients<false>(to_keys, sums.read, tile.grads, tile.state, tile.queries, tile.keys, tile.grad_scores,
                           from_start);
    } else {
      key_gradients<true>(to_keys, sums.written, tile.values, tile.g, tile.keys, tile.queries, tile.grad_scores,
                          to_end);
    }

    if constexpr (kEarly) {
      __syncthreads();  // values and state have been read
      if (more) start_state(chunk - 1);
      cukit::cp_async_commit();
    }
    float of_values[kShare / 2];
    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < KeyTile::kSteps; ++k) {
      cukit::wgmma<T, kShare, false, true>(
          of_values, KeyTile::k_major(tile.keys) + KeyTile::k_step(k),
          StateTile::mn_major(tile.g) + group * kShareStep + StateTile::mn_step(k), k > 0);
    }
    cukit::wgmma_commit();

    cukit::wgmma_wait<0>(of_values);
    if constexpr (!CHANNELS) scale_rows(of_values, to_end);

    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      cukit::wgmma<T, kShare, true, true>(
          of_values, ScoreTile::mn_major(tile.scores) + ScoreTile::mn_step(k),
          ValueTile::mn_major(tile.grads) + group * kShareStep + ValueTile::mn_step(k), true);
    }
    cukit::wgmma_commit();
    constexpr bool kSplitRows = Rows::kRowGroups == kGroups;
    const unsigned long long query_columns =
        KeyTile::mn_major(tile.queries) + (kSplitRows ? group * KeyTile::kPart : 0);
    const unsigned long long scaled_rows =
        ValueTile::mn_major(CHANNELS ? tile.grads : tile.scaled) + (kSplitRows ? 0 : group * kShareStep);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      cukit::wgmma<T, 8 * Rows::kColumnTiles, true, true>(g[0], query_columns + KeyTile::mn_step(k),
                                                          scaled_rows + ValueTile::mn_step(k), true);
    }
    cukit::wgmma_commit();
    cukit::wgmma_wait<1>(of_values);
    const cukit::ResultRows<T> to_values{{1.0f, 1.0f},
                                         {exists[0], exists[1]},
                                         grad_x + value_at + (token + row) * value_stride + kShare * group,
                                         value_stride,
                                         columns - kShare * group};
    cukit::write_rows<PADDED>(of_values, to_values);
    cukit::wgmma_wait<0>(g[0]);
    __syncthreads();  // all products have read the tiles, and the sums are visible

    if (more) {
      if constexpr (!kEarly) start_state(chunk - 1);
      start_tokens(chunk - 1);
      state_rows.template round<T>(tile.g, g);
      if (!CHANNELS && warp == 1) decay.scan(own);
    }
    cukit::cp_async_commit();
    if constexpr (CHANNELS) {
      float* const to = grad_decay + (slot * tiles + blockIdx.y) * p.state_dim;
      const int n = threadIdx.x;
      if (n < p.state_dim) {
        const float low = sums.read[n % 64], high = sums.written[n % 64];
        to[n] = !kSplitRows ? low + high : n < 64 ? low : high;
      }
    } else if (warp == 0) {
      float change[2], total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * lane + i;
        float begins = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; ++w) begins += sums.columns[w][at];
        change[i] = begins - sums.rows[0][at] - sums.rows[1][at] + sums.written[at] - sums.read[at];
        total += sums.read[at];
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
