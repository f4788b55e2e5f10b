// Gated linear recurrence, chunk by chunk, with wgmma. Equations, STATES and REVERSE: see
// gated_scan_sm80.cu.
//
// Papers: Dao and Gu, arXiv:2405.21060 (the chunked form); Yang et al., arXiv:2312.06635.
//
// Mapping: grid (segment, column tile, sequence * heads + head of the launch). A block of one or
//   two warpgroups iterates over the chunks of 64 tokens of its segment and prefetches the next
//   chunk. The state stays in registers, as the float accumulators of its update, and is rounded to
//   shared memory for the outputs. Per chunk:
//
//     scores  = C B^T              outputs = C h            asynchronously, while values are scaled
//     outputs = exp(s) outputs + (decayed scores) X         scores from registers
//     h       = exp(s_last) h + B^T X',   X'_j = exp(s_last - s_j) x_j
//
// CHANNELS: a decay per row of the state. gated_scan_channels.cu has already decayed queries, keys and scores; only
//   the state is decayed here.
// Programmatic dependent launch: the first copies of the inputs are issued before the wait for the
//   kernels that compute the segments' states.
// Shared memory, in parts of 64 columns with a 128-byte swizzle, dynamic, all of 2 bytes: 2 stages
//   x (64 x STATE_TILE keys, 64 x 64 values, with STATES 0 also 64 x STATE_TILE queries), 64 x 64
//   scaled values, STATE_TILE x 64 state unless STATES is 1. Static: 64 floats per warp.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; STATES 0|1|2; REVERSE 0|1,
//   0 unless STATES is 1; CHANNELS 0|1; PADDED 0|1: state_dim or head_dim is not a multiple of its
//   tile (both are multiples of 8); THREADS 128, or with STATES 1 or 2 also 256: two warpgroups,
//   each with half of the state.
// Architecture: sm_90 (sm_90a) only. Accumulates in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan.
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
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
constexpr bool kSegments = STATES == 1;
constexpr int kGroups = THREADS / cukit::kWarpgroupThreads;
static_assert(kGroups == 1 || (kGroups == 2 && STATES), "one warpgroup for outputs");
static_assert(!REVERSE || kSegments, "REVERSE needs STATES 1");

using KeyTile = cukit::SharedTile<T, kChunk, STATE_TILE>;
using ValueTile = cukit::SharedTile<T, kChunk, kColumns>;
using StateTile = cukit::SharedTile<T, STATE_TILE, kColumns>;
using Rows = cukit::StateRows<STATE_TILE, kGroups>;
using Decay = cukit::StateDecay<Rows, CHANNELS>;

constexpr int kQueryBytes = STATES ? 0 : KeyTile::kBytes;
constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes + kQueryBytes;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, STATE_TILE == 64 && kGroups == 1 ? 3 : 2) gated_scan(
    const T* __restrict__ x,              // [tokens, num_heads, head_dim]
    const T* __restrict__ b,              // [tokens, num_groups, state_dim]
    const T* __restrict__ c,              // [tokens, num_groups, state_dim], without STATES
    const float* __restrict__ log_decay,  // [tokens, num_heads]; with CHANNELS sums of each chunk, log2,
                                          // [slots, heads, state_dim]
    const T* __restrict__ scores,         // [slots, heads, 64, 64], decayed, with CHANNELS
    const int* __restrict__ cu_seqlens,   // [num_sequences + 1] or null: seq_len each
    const float* initial,                 // state before each segment, or null: [num_sequences,
                                          // segments, heads, state_dim, head_dim], with one
                                          // segment [num_sequences, num_heads, state_dim, head_dim]
    T* __restrict__ y,                    // [tokens, num_heads, head_dim]; with STATES 2
                                          // [slots, heads, state_dim, head_dim]
    float* __restrict__ states,           // with STATES 1 like initial, with STATES 0
                                          // [num_sequences, num_heads, state_dim, head_dim]
    float* __restrict__ total_decay,      // [num_sequences, segments, heads], with CHANNELS also
                                          // [.., state_dim], log2, with STATES 1
    const __grid_constant__ cukit::ScanParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, memory);
  __shared__ float decays[kWarps][kChunk];
  const int warp = threadIdx.x / kWarpSize;
  cukit::release_next_grid();
  const cukit::ScanWork work(p, cu_seqlens, REVERSE);
  const int column = work.column, columns = work.columns, length = work.length;

  const long long value_stride = static_cast<long long>(p.num_heads) * p.head_dim;
  const long long key_stride = static_cast<long long>(p.num_groups) * p.state_dim;
  const long long value_at = work.begin * value_stride + work.head * p.head_dim + column;
  const long long key_at = work.begin * key_stride + work.group * p.state_dim;
  if constexpr (!CHANNELS) log_decay += work.begin * p.num_heads + work.head;

  const unsigned base = cukit::shared_address(memory);
  unsigned char* const scaled = memory + 2 * kStageBytes;
  unsigned char* const state_tile = scaled + ValueTile::kBytes;
  using Values = cukit::TileCopy<kChunk, kColumns, THREADS, PADDED>;
  const auto start = [&](int chunk, int stage) {
    const int token = chunk * kChunk;
    const int rows = length - token;
    const unsigned at = base + stage * kStageBytes;
    cukit::start_parts<STATE_TILE, THREADS, PADDED>(at, b + key_at + token * key_stride, key_stride, rows, p.state_dim);
    Values::start(at + KeyTile::kBytes, x + value_at + token * value_stride, value_stride, rows, columns);
    if constexpr (!STATES) {
      cukit::start_parts<STATE_TILE, THREADS, PADDED>(at + KeyTile::kBytes + ValueTile::kBytes,
                                                      c + key_at + token * key_stride, key_stride, rows, p.state_dim);
    }
  };

  float h[Rows::kTiles][4 * Rows::kColumnTiles];
#pragma unroll
  for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
    for (float& value : h[m]) value = 0.0f;
  const Rows rows;
  const long long state_size = static_cast<long long>(p.state_dim) * p.head_dim;
  const long long place = work.place(p);

  const cukit::ChunkDecays decay{decays[warp]};
  const int chunks = work.end - work.first;
  const int step = kSegments && !REVERSE ? -1 : 1;
  const int start_chunk = step > 0 ? work.first : work.end - 1;
  float own[2];
  Decay total;
  if (chunks > 0) {
    start(start_chunk, 0);
    if constexpr (!CHANNELS) cukit::read_decays(own, log_decay, p.num_heads, start_chunk, length);
  }
  cukit::cp_async_commit();
  if constexpr (!kSegments) {
    cukit::wait_for_previous_grids();
    if (initial != nullptr) {
      const float* from = initial + place * state_size;
      rows.each(h, p, column, [&](float& value, int at) { value = from[at]; });
    }
    if (chunks > 0) rows.template round<T>(state_tile, h);
  }

#pragma unroll 1
  for (int turn = 0; turn < chunks; ++turn) {
    const int chunk = start_chunk + step * turn;
    const bool more = turn + 1 < chunks;
    Decay last;
    unsigned packed[kChunk / 16][4];
    if constexpr (CHANNELS) {
      const long long slot = work.chunk_place(p, chunk);
      last.read(log_decay + slot * p.state_dim, rows, p.state_dim);
      if constexpr (!STATES) {
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
          cukit::load_scores(packed[k], scores + slot * (kChunk * kChunk) + 16 * (warp * kChunk + k));
        }
      }
    }
    unsigned char* const keys = memory + turn % 2 * kStageBytes;
    unsigned char* const values = keys + KeyTile::kBytes;
    cukit::cp_async_wait<0>();
    cukit::fence_proxy_async();  // for the copied tiles and the rounded state
    __syncthreads();
    if (more) start(chunk + step, (turn + 1) % 2);
    cukit::cp_async_commit();
    if constexpr (STATES == 2) {
      T* to = y + work.chunk_place(p, chunk) * state_size + column;
      cukit::store_tile<STATE_TILE, kColumns, THREADS, PADDED>(to, p.head_dim, state_tile, 0, p.state_dim,
                                                              columns, threadIdx.x);
    }

    float out[4 * kColumns / 8], score[4 * kChunk / 8];
    if constexpr (!STATES) {
      const unsigned long long queries = KeyTile::k_major(values + ValueTile::kBytes);
      const unsigned long long key_rows = KeyTile::k_major(keys);
      const unsigned long long state = StateTile::mn_major(state_tile);
      cukit::wgmma_fence();
      if constexpr (!CHANNELS) {
#pragma unroll
        for (int k = 0; k < KeyTile::kSteps; ++k) {
          cukit::wgmma<T, kChunk>(score, queries + KeyTile::k_step(k), key_rows + KeyTile::k_step(k), k > 0);
        }
        cukit::wgmma_commit();
      }
#pragma unroll
      for (int k = 0; k < KeyTile::kSteps; ++k) {
        cukit::wgmma<T, kColumns, false, true>(out, queries + KeyTile::k_step(k),
                                               state + StateTile::mn_step(k), k > 0);
      }
      cukit::wgmma_commit();
    }

    if constexpr (!CHANNELS) {
      decay.scan(own);
      if (more) cukit::read_decays(own, log_decay, p.num_heads, chunk + step, length);
      const float whole = decay.last();
      last.sums[0][0] = whole;
      // Decay from a token to the end of the chunk, or with REVERSE from the chunk's start to the token.
      cukit::scale_values<T, THREADS>(scaled, values, [&](int token) {
        return exp2f(REVERSE ? decay.cumsum[token] : whole - decay.cumsum[token]);
      });
      cukit::fence_proxy_async();
    }

    if constexpr (!STATES && CHANNELS) cukit::wgmma_wait<0>(out);
    if constexpr (!STATES && !CHANNELS) {
      const int row = cukit::accumulator_row(), first_key = cukit::accumulator_column();
      const float cumsum[2] = {decay.cumsum[row], decay.cumsum[row + 8]};
      cukit::wgmma_wait<1>(score);
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const float key_cumsum[2] = {decay.cumsum[8 * n + first_key], decay.cumsum[8 * n + first_key + 1]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float decayed[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = 8 * n + first_key + i;
            decayed[i] = key <= row + 8 * half
                             ? score[4 * n + 2 * half + i] * exp2f(cumsum[half] - key_cumsum[i])
                             : 0.0f;
          }
          packed[n / 2][2 * (n % 2) + half] = cukit::pack<T>(decayed[0], decayed[1]);
        }
      }
      const float from_start[2] = {exp2f(cumsum[0]), exp2f(cumsum[1])};
      cukit::wgmma_wait<0>(out);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[4 * n + i] *= from_start[i / 2];
    }
    __syncthreads();  // scaled values are visible, and all warps have read the previous state

    float added[kSegments ? Rows::kTiles : 1][4 * Rows::kColumnTiles];
    if constexpr (!kSegments) {
      const Decay kept = last.factors();
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4 * Rows::kColumnTiles; ++i) h[m][i] *= kept.at(m, i / 2 % 2);
    }
    cukit::wgmma_fence();
    if constexpr (!STATES) {
      const unsigned long long value_rows = ValueTile::mn_major(values);
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        cukit::wgmma<T, kColumns, true>(out, packed[k], value_rows + ValueTile::mn_step(k), true);
      }
      cukit::wgmma_commit();
    }
    // With two warpgroups, each computes 64 of the 128 rows of the state, or 32 columns of its 64
    // rows.
    constexpr bool kSplitRows = Rows::kRowGroups == kGroups;
    const int group = cukit::warp_uniform(warp / 4);
    const unsigned long long key_columns = KeyTile::mn_major(keys) + (kSplitRows ? group * KeyTile::kPart : 0);
    const unsigned long long scaled_rows =
        ValueTile::mn_major(CHANNELS ? values : scaled) + (kSplitRows ? 0 : group * (16 * Rows::kColumnTiles / 16));
#pragma unroll
    for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        const unsigned long long left = key_columns + m * KeyTile::kPart + KeyTile::mn_step(k);
        const unsigned long long right = scaled_rows + ValueTile::mn_step(k);
        if constexpr (kSegments) {
          cukit::wgmma<T, 8 * Rows::kColumnTiles, true, true>(added[m], left, right, k > 0);
        } else {
          cukit::wgmma<T, 8 * Rows::kColumnTiles, true, true>(h[m], left, right, true);
        }
      }
    cukit::wgmma_commit();

    if constexpr (!STATES) {
      cukit::wgmma_wait<1>(out);
      const int token = chunk * kChunk + cukit::accumulator_row();
      const cukit::ResultRows<T> target{{1.0f, 1.0f},
                                        {token < length, token + 8 < length},
                                        y + value_at + token * value_stride,
                                        value_stride,
                                        columns};
      cukit::write_rows<PADDED>(out, target);
    }
    if constexpr (kSegments) {
      const Decay factor = total.factors();
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m) {
        cukit::wgmma_wait<0>(added[m]);
#pragma unroll
        for (int i = 0; i < 4 * Rows::kColumnTiles; ++i) {
          h[m][i] = fmaf(factor.at(m, i / 2 % 2), added[m][i], h[m][i]);
        }
      }
      total.add(last);
      if (total.all_zero()) break;
    } else {
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m) cukit::wgmma_wait<0>(h[m]);
      if (more) rows.template round<T>(state_tile, h);
    }
  }

  if constexpr (kSegments) {
    cukit::cp_async_wait<0>();
    cukit::wait_for_previous_grids();
    float* to = states + place * state_size;
    rows.each(h, p, column, [&](float& value, int at) { to[at] = value; });
    if constexpr (CHANNELS) {
      if (blockIdx.y == 0) total.write(total_decay + place * p.state_dim, rows, p.state_dim);
    } else if (blockIdx.y == 0 && threadIdx.x == 0) {
      total_decay[place] = total.sums[0][0];
    }
  } else if (STATES == 0 && work.segment == p.segments - 1) {
    float* to = states + work.whole_place(p) * state_size;
    rows.each(h, p, column, [&](float& value, int at) { to[at] = value; });
  }
}
