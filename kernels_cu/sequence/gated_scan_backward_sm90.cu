// Gradients of a gated linear recurrence, chunk by chunk from the last to the first on Hopper's tensor cores.
// Equations: see gated_scan_backward_sm80.cu.
//
// Papers: Dao and Gu, arXiv:2405.21060; Yang et al., arXiv:2312.06635.
//
// Mapping: grid (segment, column tile, sequence * num_heads + head); a block of two warpgroups iterates over the
//   chunks of 64 tokens of its segment, from the last to the first. g, the gradient of the state after a chunk,
//   stays in registers as floats and is rounded to shared memory for the products that read it. Per chunk, with D
//   the gradients of outputs and e the decay between two tokens:
//
//     first warpgroup                           second warpgroup
//     V  = D X^T                                S^T = B C^T,  V^T = X D^T
//     g  = exp(s_last) g + C^T D'               db = exp(s_last - s) (X g^T) + (e V)^T C
//     dc = exp(s) (D h^T) + (e V) B             ---- queries, values and h have been read
//     the decays' gradients                     dx = exp(s_last - s) (B g) + (e S)^T D
//
//   with D'_i = exp(s_i) d_i. e V and (e S)^T are rounded in registers, as left operands. The gradient of a decay
//   is <g, h> plus the sum of b db - c dc over the earlier tokens of the chunk, without terms of a token with itself:
//   those of two earlier tokens cancel, because both products read the same rounded e V.
// Shared memory, in parts of 64 columns with a 128-byte swizzle: 64 x STATE_TILE queries, 64 x 64 values,
//   STATE_TILE x 64 state | twice 64 x STATE_TILE keys, 64 x 64 gradients of outputs | STATE_TILE x 64 of g | D' or,
//   with CHANNELS, scores, 64 x 64, all of 2 bytes, dynamic; 800 bytes static. Keys and gradients of the next chunk
//   are copied during the whole of this one, the other tiles during dx. Two blocks per SM.
// CHANNELS: a decay per row of the state. gated_scan_channels.cu has decayed queries, keys and scores; only g is
//   decayed here, and gated_scan_channels_backward.cu computes dc, db and the decays' gradients from V,
//   D h^T, X g^T and the rows of <g, h>, which are the results here.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; CHANNELS 0|1; PADDED 0|1: state_dim or
//   head_dim is not a multiple of its tile (both are of 8); THREADS 256.
// Architecture: sm_90 (sm_90a) only. Accumulates in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_backward.
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
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
constexpr int kGroup = cukit::kWarpgroupThreads;
static_assert(THREADS == 2 * kGroup, "two warpgroups");
static_assert(kChunk == 64 && kColumns == 64, "products of 64 x 64");

using KeyTile = cukit::SharedTile<T, kChunk, STATE_TILE>;
using ValueTile = cukit::SharedTile<T, kChunk, kColumns>;
using StateTile = cukit::SharedTile<T, STATE_TILE, kColumns>;
using ScoreTile = cukit::SharedTile<T, kChunk, kChunk>;
using Rows = cukit::StateRows<STATE_TILE>;
using Decay = cukit::StateDecay<Rows, CHANNELS>;
// Of columns, in the first warpgroup, whose g occupies registers.
constexpr int kPieces = CHANNELS ? 1 : 2;
using Scores = unsigned[kChunk / 16][4];  // 64 x 64, left operands of wgmma

// Barriers besides __syncthreads', which is 0.
constexpr int kScaled = 1;  // D' is written: the first warpgroup
constexpr int kRead = 2;    // g has been read: both

struct Tiles {
  unsigned char *queries, *values, *state, *g, *scaled, *keys, *grads;

  CUKIT_DEVICE Tiles(unsigned char* memory, int stage)
      : queries(memory),
        values(queries + KeyTile::kBytes),
        state(values + ValueTile::kBytes),
        g(state + StateTile::kBytes),
        scaled(g + StateTile::kBytes),
        keys(scaled + ValueTile::kBytes + stage * (KeyTile::kBytes + ValueTile::kBytes)),
        grads(keys + KeyTile::kBytes) {}
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

// Decays products of tokens [rows, columns], and rounds them: zeros where the column is a later token than the row,
// or with Transposed an earlier one. The products are 2 N columns from `first_column` on. The first ones' diagonal
// becomes zero, and the elements of the lane's rows go to `diagonal`.
template <bool Transposed, int Count, int N>
CUKIT_DEVICE void decay_scores(Scores (&to)[Count], float (&diagonal)[2], const float (&products)[Count][N],
                               const float* upto, int first_column = 0) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = cukit::accumulator_row(), first = cukit::accumulator_column();
  const int least = cukit::warp_uniform(row / 16 * 16);  // of the warp's rows
  const float own[2] = {upto[row], upto[row + 8]};
#pragma unroll
  for (int eight = 0; eight < N / 4; ++eight) {
    const int n = first_column / 8 + eight;
    if (Transposed ? 8 * n + 7 < least : 8 * n > least + 15) {
#pragma unroll
      for (int c = 0; c < Count; ++c) to[c][n / 2][2 * (n % 2)] = to[c][n / 2][2 * (n % 2) + 1] = 0;
      continue;
    }
    const int column = 8 * n + first;
    const float other[2] = {upto[column], upto[column + 1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const of_values = &products[0][4 * eight + 2 * half];
      if (8 * n == least + 8 * half) {
        diagonal[half] = __shfl_sync(cukit::kFullMask, lane / 4 % 2 == 0 ? of_values[0] : of_values[1],
                                     lane / 4 * 4 + lane / 8);
      }
      float between[2];
      bool same[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float power = Transposed ? other[i] - own[half] : own[half] - other[i];
        const int distance = Transposed ? column + i - row - 8 * half : row + 8 * half - column - i;
        between[i] = distance >= 0 ? exp2f(power) : 0.0f;
        same[i] = distance == 0;
      }
      to[0][n / 2][2 * (n % 2) + half] = cukit::pack<T>(same[0] ? 0.0f : of_values[0] * between[0],
                                                        same[1] ? 0.0f : of_values[1] * between[1]);
      if constexpr (Count == 2) {
        const float* product = &products[Count - 1][4 * eight + 2 * half];
        to[1][n / 2][2 * (n % 2) + half] = cukit::pack<T>(product[0] * between[0], product[1] * between[1]);
      }
    }
  }
}

// Stores to to[row], or adds if `first` > 0, the dot product of rows of accumulators with columns of `own` from
// `first` on. Then adds rows of `others` times `diagonal` to the accumulators.
template <int N>
CUKIT_DEVICE void dot_rows(float* to, float (&acc)[N], const unsigned char* own, const unsigned char* others,
                           const float (&diagonal)[2], int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = cukit::accumulator_row() + 8 * half;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      const int column = first + 8 * n + cukit::accumulator_column();
      float pair[2], other[2];
      pair_at<kChunk>(pair, own, row, column);
      pair_at<kChunk>(other, others, row, column);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = acc[4 * n + 2 * half + i];
        sum = fmaf(value, pair[i], sum);
        value = fmaf(diagonal[half], other[i], value);
      }
    }
    sum = cukit::warp_reduce<cukit::Sum, 4>(sum);
    if (threadIdx.x % 4 == 0) to[row] = first > 0 ? to[row] + sum : sum;
  }
}

// The gradients of a chunk's queries or keys, by one warpgroup, Width columns at a time:
//   by (rows states^T) + scores others       by: per row, e^...
// `rows` are gradients of outputs or values, `states` h or g, `own` and `others` queries and keys or the reverse.
// The scores' diagonal is separate. Stores the dot products of the rest with rows of `own` to `dots`. With CHANNELS only the first term, without factors.
template <int Width>
CUKIT_DEVICE void key_gradients(const cukit::ResultRows<T>& target, float* dots, const unsigned char* rows,
                                const unsigned char* states, const unsigned char* own,
                                const unsigned char* others, const Scores& scores, const float (&diagonal)[2],
                                const float (&by)[2]) {
  constexpr int kUnroll = CHANNELS ? 1 : STATE_TILE / Width;  // unrolled, CHANNELS spill registers
#pragma unroll kUnroll
  for (int first = 0; first < STATE_TILE; first += Width) {
    float out[Width / 2];
    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < ValueTile::kSteps; ++k) {
      cukit::wgmma<T, Width>(out, ValueTile::k_major(rows) + ValueTile::k_step(k),
                             StateTile::k_major(states) + StateTile::rows(first) + StateTile::k_step(k), k > 0);
    }
    cukit::wgmma_commit();
    if constexpr (!CHANNELS) {
      cukit::wgmma_wait<0>(out);
      scale_rows(out, by);
      const int within = first / 64 * KeyTile::kPart + first % 64 * 2 / 16;
      cukit::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        cukit::wgmma<T, Width, true>(out, scores[k], KeyTile::mn_major(others) + within + KeyTile::mn_step(k), true);
      }
      cukit::wgmma_commit();
    }
    cukit::ResultRows<T> to = target;
    to.first += first;
    to.columns -= first;
    cukit::wgmma_wait<0>(out);
    if constexpr (!CHANNELS) dot_rows(dots, out, own, others, diagonal, first);
    cukit::write_rows<PADDED>(out, to);
  }
}

// Products of a tile's 64 rows with 2 N rows of another.
template <typename Tile, int N>
CUKIT_DEVICE void row_products(float (&out)[N], const unsigned char* rows, const unsigned char* columns,
                               int first_column = 0) {
#pragma unroll
  for (int k = 0; k < Tile::kSteps; ++k) {
    cukit::wgmma<T, 2 * N>(out, Tile::k_major(rows) + Tile::k_step(k),
                           Tile::k_major(columns) + Tile::rows(first_column) + Tile::k_step(k), k > 0);
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
  __shared__ float of_queries[kChunk], of_keys[kChunk];  // c dc, b db
  __shared__ float passing[4];                           // <g, h>, per warp
  const int lane = threadIdx.x % kWarpSize, warp = cukit::warp_uniform(threadIdx.x / kWarpSize);
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

  using Values = cukit::TileCopy<kChunk, kColumns, THREADS, PADDED>;
  using States = cukit::TileCopy<STATE_TILE, kColumns, THREADS, PADDED>;
  const auto start_keys = [&](const Tiles& to, int chunk) {
    const int token = chunk * kChunk, rows = length - token;
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(cukit::shared_address(to.keys), b + key_at + token * key_stride,
                                                    key_stride, rows, p.state_dim);
    Values::start(cukit::shared_address(to.grads), grad_y + value_at + token * value_stride, value_stride, rows,
                  columns);
  };
  const auto start_others = [&](const Tiles& to, int chunk) {
    const int token = chunk * kChunk, rows = length - token;
    Values::start(cukit::shared_address(to.values), x + value_at + token * value_stride, value_stride, rows, columns);
    States::start(cukit::shared_address(to.state), chunk_states + work.chunk_place(p, chunk) * state_size + column,
                  p.head_dim, p.state_dim, columns);
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(cukit::shared_address(to.queries),
                                                    c + key_at + token * key_stride, key_stride, rows, p.state_dim);
  };
  // The copies of a chunk besides its own have not ended when it starts.
  const auto begin = [&](const Tiles& next, const Tiles& tile, int chunk) {
    cukit::cp_async_wait<0>();
    cukit::fence_proxy_async();  // for the copied tiles and the rounded g
    __syncthreads();
    if (chunk > work.first) start_keys(next, chunk - 1);
    if constexpr (CHANNELS) {
      cukit::TileCopy<kChunk, kChunk, THREADS, false>::start(
          cukit::shared_address(tile.scaled), scores + work.chunk_place(p, chunk) * (kChunk * kChunk), kChunk, kChunk,
          kChunk);
    }
    cukit::cp_async_commit();
  };
  const auto middle = [&](const Tiles& tile, int chunk) {
    if constexpr (CHANNELS) {
      cukit::cp_async_wait<0>();
      cukit::fence_proxy_async();  // for the scores
    }
    __syncthreads();  // queries, values and state have been read, and the dot products are visible
    if (chunk > work.first) start_others(tile, chunk - 1);
    cukit::cp_async_commit();
  };

  const int row = cukit::accumulator_row();
  const cukit::ChunkDecays decay{decays};
  if (work.first < work.end) {
    const Tiles first(memory, (work.end - 1) % 2);
    start_keys(first, work.end - 1);
    start_others(first, work.end - 1);
  }
  cukit::cp_async_commit();

  if (warp < 4) {
    float g[Rows::kTiles][32];
#pragma unroll
    for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
      for (float& value : g[m]) value = 0.0f;
    const Rows state_rows;
    if (grad_states != nullptr) {
      const float* from = grad_states + work.place(p) * state_size;
      state_rows.each(g, p, column, [&](float& value, int at) { value = from[at]; });
    }
    float own[2];
    if (work.first < work.end) {
      if (!CHANNELS && warp == 1) {
        cukit::read_decays(own, log_decay, p.num_heads, work.end - 1, length);
        decay.scan(own);
      }
      state_rows.template round<T>(Tiles(memory, 0).g, g);
    }

#pragma unroll 1
    for (int chunk = work.end - 1; chunk >= work.first; --chunk) {
      // Opaque, so that the compiler does not keep addresses within the tiles in registers across chunks.
      const Tiles tile(memory + cukit::opaque(0), chunk % 2);
      begin(Tiles(memory, (chunk + 1) % 2), tile, chunk);
      const bool more = chunk > work.first;
      const int token = chunk * kChunk;
      const bool exists[2] = {token + row < length, token + row + 8 < length};
      const long long slot = work.chunk_place(p, chunk);

      float products[1][32 / kPieces];
      cukit::wgmma_fence();
      row_products<ValueTile>(products[0], tile.grads, tile.values);
      cukit::wgmma_commit();

      Decay last;
      float grown[2];  // decay up to the lane's rows
      if constexpr (CHANNELS) {
        last.read(log_decay + slot * p.state_dim, state_rows, p.state_dim);
      } else {
        if (more && warp == 1) cukit::read_decays(own, log_decay, p.num_heads, chunk - 1, length);
        cukit::scale_values<T, kGroup>(tile.scaled, tile.grads, [&](int i) { return exp2f(decay.upto[i]); });
        cukit::fence_proxy_async();
        last.sums[0][0] = decay.last();
#pragma unroll
        for (int half = 0; half < 2; ++half) grown[half] = exp2f(decay.upto[row + 8 * half]);
      }
      const Decay kept = last.factors();
      // <g, h>, per row of the state.
      const auto products_with_state = [&](float (&sums)[Rows::kTiles][2]) {
#pragma unroll
        for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              float pair[2];
              pair_at<STATE_TILE>(pair, tile.state, state_rows.row + 64 * m + 8 * half, 8 * n + state_rows.column);
              sum = fmaf(g[m][4 * n + 2 * half], pair[0], sum);
              sum = fmaf(g[m][4 * n + 2 * half + 1], pair[1], sum);
            }
            sums[m][half] = sum;
          }
      };
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 32; ++i) g[m][i] *= kept.at(m, i / 2 % 2);
      float with_state[Rows::kTiles][2];
      if constexpr (CHANNELS) {
        products_with_state(with_state);
        Decay::write_sums(grad_decay + (slot * tiles + blockIdx.y) * p.state_dim, with_state, state_rows,
                          p.state_dim);
      } else {
        cukit::named_sync(kScaled, kGroup);
      }

      const unsigned long long query_columns = KeyTile::mn_major(tile.queries);
      const unsigned long long grad_rows = ValueTile::mn_major(CHANNELS ? tile.grads : tile.scaled);
      cukit::wgmma_fence();
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
          cukit::wgmma<T, 64, true, true>(g[m], query_columns + m * KeyTile::kPart + KeyTile::mn_step(k),
                                          grad_rows + ValueTile::mn_step(k), true);
        }
      cukit::wgmma_commit();

      Scores decayed[1];
      float diagonal[2];
      cukit::wgmma_wait<1>(products[0]);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int first_column = piece * (kChunk / kPieces);
        if (piece > 0) {
          cukit::wgmma_fence();
          row_products<ValueTile>(products[0], tile.grads, tile.values, first_column);
          cukit::wgmma_commit();
          cukit::wgmma_wait<0>(products[0]);
        }
        if constexpr (CHANNELS) {
#pragma unroll
          for (int i = 0; i < 32 / kPieces; ++i) {
            const int key = first_column + 8 * (i / 4) + cukit::accumulator_column() + i % 2;
            if (key > row + i / 2 % 2 * 8) products[0][i] = 0.0f;
          }
          T* const to = grad_scores + (slot * tiles + blockIdx.y) * (kChunk * kChunk) + row * kChunk;
          const cukit::ResultRows<T> to_scores{{1.0f, 1.0f}, {true, true}, to + first_column, kChunk, kChunk};
          cukit::write_rows<false>(products[0], to_scores);
        } else {
          decay_scores<false>(decayed, diagonal, products, decay.upto, first_column);
        }
      }
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m) cukit::wgmma_wait<0>(g[m]);
      if constexpr (!CHANNELS) {
        products_with_state(with_state);
        float sum = 0.0f;
#pragma unroll
        for (int m = 0; m < Rows::kTiles; ++m) sum += with_state[m][0] + with_state[m][1];
        sum = cukit::warp_reduce<cukit::Sum>(sum);
        if (lane == 0) passing[warp] = sum;
      }

      const cukit::ResultRows<T> to_queries{{1.0f, 1.0f},
                                            {exists[0], exists[1]},
                                            grad_c + part_at + (token + row) * part_stride,
                                            part_stride,
                                            p.state_dim};
      key_gradients<64 / kPieces>(to_queries, of_queries, tile.grads, tile.state, tile.queries, tile.keys, decayed[0],
                                  diagonal, grown);
      middle(tile, chunk);

      if constexpr (!CHANNELS) {
        if (warp == 0) {
          float change[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) change[i] = of_keys[2 * lane + i] - of_queries[2 * lane + i];
          const float first = (passing[0] + passing[1]) + (passing[2] + passing[3]);
          cukit::write_decay_gradients(grad_decay + (work.begin * p.num_heads * tiles + part), change, first,
                                       log_decay, token, length, p.num_heads, tiles);
        }
        if (more && warp == 1) decay.scan(own);
      }
      cukit::named_sync(kRead, THREADS);
      if (more) state_rows.template round<T>(tile.g, g);
    }

    if (work.segment == 0) {
      float* to = grad_initial +
                  (static_cast<long long>(work.sequence) * p.num_heads + work.head) * state_size;
      state_rows.each(g, p, column, [&](float& value, int at) { to[at] = value; });
    }
  } else {
#pragma unroll 1
    for (int chunk = work.end - 1; chunk >= work.first; --chunk) {
      const Tiles tile(memory + cukit::opaque(0), chunk % 2);
      begin(Tiles(memory, (chunk + 1) % 2), tile, chunk);
      const int token = chunk * kChunk;
      const bool exists[2] = {token + row < length, token + row + 8 < length};

      Scores decayed[2];  // of values and gradients, of keys and queries
      float diagonal[2];
      float left[2];  // decay from the lane's rows to the end of the chunk
      if constexpr (!CHANNELS) {
        float products[2][32];
        cukit::wgmma_fence();
        row_products<ValueTile>(products[0], tile.values, tile.grads);
        row_products<KeyTile>(products[1], tile.keys, tile.queries);
        cukit::wgmma_commit();
#pragma unroll
        for (int half = 0; half < 2; ++half) left[half] = exp2f(decay.last() - decay.upto[row + 8 * half]);
        cukit::wgmma_wait<0>(products[0]);
        cukit::wgmma_wait<0>(products[1]);
        decay_scores<true>(decayed, diagonal, products, decay.upto);
      }
      const cukit::ResultRows<T> to_keys{{1.0f, 1.0f},
                                         {exists[0], exists[1]},
                                         grad_b + part_at + (token + row) * part_stride,
                                         part_stride,
                                         p.state_dim};
      key_gradients<64>(to_keys, of_keys, tile.values, tile.g, tile.keys, tile.queries, decayed[0], diagonal,
                        left);
      middle(tile, chunk);

      float of_values[32];
      cukit::wgmma_fence();
#pragma unroll
      for (int k = 0; k < KeyTile::kSteps; ++k) {
        cukit::wgmma<T, 64, false, true>(of_values, KeyTile::k_major(tile.keys) + KeyTile::k_step(k),
                                         StateTile::mn_major(tile.g) + StateTile::mn_step(k), k > 0);
      }
      cukit::wgmma_commit();
      cukit::wgmma_wait<0>(of_values);
      cukit::named_arrive(kRead, THREADS);
      if constexpr (!CHANNELS) scale_rows(of_values, left);
      cukit::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        const unsigned long long grad_rows = ValueTile::mn_major(tile.grads) + ValueTile::mn_step(k);
        if constexpr (CHANNELS) {
          cukit::wgmma<T, 64, true, true>(of_values, ScoreTile::mn_major(tile.scaled) + ScoreTile::mn_step(k),
                                          grad_rows, true);
        } else {
          cukit::wgmma<T, 64, true>(of_values, decayed[1][k], grad_rows, true);
        }
      }
      cukit::wgmma_commit();
      cukit::wgmma_wait<0>(of_values);
      const cukit::ResultRows<T> to_values{{1.0f, 1.0f},
                                           {exists[0], exists[1]},
                                           grad_x + value_at + (token + row) * value_stride,
                                           value_stride,
                                           columns};
      cukit::write_rows<PADDED>(of_values, to_values);
    }
  }
  cukit::cp_async_wait<0>();
}
