// Gated linear recurrence, chunk by chunk on tensor cores.
//
//   h_t = exp(l_t) h_{t-1} + b_t x_t^T      y_t = h_t^T c_t      l_t <= 0, one per head
//
// With s_i the sum of a chunk's log decays l up to token i, and h the state before the chunk:
//   y_i = exp(s_i) h^T c_i + sum_{j <= i} exp(s_i - s_j) (c_i . b_j) x_j
//   h'  = exp(s_last) h + sum_j exp(s_last - s_j) b_j x_j^T
// Only s and its differences s_i - s_j with j <= i are exponentiated; none of them is positive. l
// is clamped to -104, so that s keeps its precision: exp(-104) is 0 in float.
// Papers: Dao and Gu, arXiv:2405.21060 (the chunked form); Yang et al., arXiv:2312.06635.
//
// Mapping: grid (segment, column tile, sequence * heads + head of the launch); a block of four
//   warps iterates over the chunks of 64 tokens of its segment. Warp w computes 16 rows of the
//   chunk's outputs, from row 16 w on, and a quarter of the rows of the state, which stay in
//   registers as floats.
//   The state, decayed scores and decayed keys are rounded to DTYPE for the products.
// STATES 0: outputs, and the final state of each sequence.
// STATES 1: the final state of each segment for an initial state of 0, from which join_segments.cu
//   computes the initial states of the segments (the grid omits the last segment). Chunks are
//   processed from last to first, and the loop ends when all earlier contributions are 0.
//   With REVERSE: the gradient of each segment's initial state if that of its final state is 0,
//   g = sum_i exp(s_i) c_i d_i^T, with s summed from the segment's first token on and d_i the
//   gradient of y_i (the grid omits the first segment). x then holds the gradients of the outputs,
//   and b the queries c. Chunks are processed from first to last.
// STATES 2: the state before each chunk, rounded, for gated_scan_backward_sm80.cu and _sm90.cu.
// CHANNELS: a decay per row of the state. gated_scan_channels.cu has already decayed queries, keys
//   and scores; only the state is decayed here.
// Shared memory, dynamic, all of 2 bytes: 2 stages x (64 x STATE_TILE keys, with STATES 0 also
//   64 x STATE_TILE queries, 64 x 64 values), STATE_TILE x 64 state unless STATES is 1. Static: 64
//   floats per warp.
// Macros: DTYPE float16|bfloat16; STATE_TILE 64|128, at least state_dim; STATES 0|1|2; REVERSE 0|1,
//   0 unless STATES is 1; CHANNELS 0|1; PADDED 0|1: state_dim or head_dim is not a multiple of its
//   tile (both are multiples of 8); THREADS 128.
//   Minimum architecture: sm_80. Accumulates in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/pack.cuh"
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
constexpr int kColumnTiles = kColumns / 8;
constexpr int kKeyBytes = kChunk * STATE_TILE * 2;
constexpr int kValueBytes = kChunk * kColumns * 2;
constexpr int kQueryBytes = STATES ? 0 : kKeyBytes;
constexpr int kStageBytes = kKeyBytes + kQueryBytes + kValueBytes;
constexpr bool kSegments = STATES == 1;
static_assert(kChunk == 16 * kWarps, "16 rows of a chunk per warp");
static_assert(!REVERSE || kSegments, "REVERSE needs STATES 1");

using Rows = cukit::StateRows<STATE_TILE>;
using Decay = cukit::StateDecay<Rows, CHANNELS>;
using StateValues = float[Rows::kTiles][Rows::kColumnTiles][4];

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_scan(
    const T* __restrict__ x,              // [tokens, num_heads, head_dim]
    const T* __restrict__ b,              // [tokens, num_groups, state_dim]
    const T* __restrict__ c,              // [tokens, num_groups, state_dim], with STATES 0
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
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  cukit::wait_for_previous_grids();
  const cukit::ScanWork work(p, cu_seqlens, REVERSE);
  const int head = work.head, column = work.column, columns = work.columns, length = work.length;
  const long long begin = work.begin;

  const long long value_stride = static_cast<long long>(p.num_heads) * p.head_dim;
  const long long key_stride = static_cast<long long>(p.num_groups) * p.state_dim;
  x += begin * value_stride + head * p.head_dim + column;
  b += begin * key_stride + work.group * p.state_dim;
  c += begin * key_stride + work.group * p.state_dim;
  if constexpr (!CHANNELS) log_decay += begin * p.num_heads + head;

  const unsigned base = cukit::shared_address(memory);
  unsigned char* state_tile = memory + 2 * kStageBytes;
  using Keys = cukit::TileCopy<kChunk, STATE_TILE, THREADS, PADDED>;
  using Values = cukit::TileCopy<kChunk, kColumns, THREADS, PADDED>;
  const auto start = [&](int chunk, int stage) {
    const int token = chunk * kChunk;
    const int rows = length - token;
    const unsigned at = base + stage * kStageBytes;
    Keys::start(at, b + token * key_stride, key_stride, rows, p.state_dim);
    Values::start(at + kKeyBytes, x + token * value_stride, value_stride, rows, columns);
    if constexpr (!STATES) {
      Keys::start(at + kKeyBytes + kValueBytes, c + token * key_stride, key_stride, rows, p.state_dim);
    }
  };

  StateValues h;
  cukit::clear(h);
  const Rows rows;
  const int state_column = rows.column;
  const long long state_size = static_cast<long long>(p.state_dim) * p.head_dim;
  const long long place = work.place(p);
  if (!kSegments && initial != nullptr) {
    const float* from = initial + place * state_size;
    rows.each(h, p, column, [&](float& value, int at) { value = from[at]; });
  }

  const cukit::ChunkDecays decay{decays[warp]};
  const int chunks = work.end - work.first;
  const int step = kSegments && !REVERSE ? -1 : 1;
  const int start_chunk = step > 0 ? work.first : work.end - 1;
  float own[2];
  Decay total;
  if (chunks > 0) {
    start(start_chunk, 0);
    if constexpr (!CHANNELS) cukit::read_decays(own, log_decay, p.num_heads, start_chunk, length);
    if constexpr (!kSegments) rows.round<T>(state_tile, h);
  }
  cukit::cp_async_commit();

#pragma unroll 1
  for (int turn = 0; turn < chunks; ++turn) {
    const int chunk = start_chunk + step * turn;
    const int stage = turn % 2;
    const bool more = turn + 1 < chunks;
    cukit::cp_async_wait<0>();
    __syncthreads();
    if (more) start(chunk + step, stage ^ 1);
    cukit::cp_async_commit();
    Decay last;
    const long long slot = work.chunk_place(p, chunk);
    if constexpr (CHANNELS) {
      last.read(log_decay + slot * p.state_dim, rows, p.state_dim);
    } else {
      decay.scan(own);
      if (more) cukit::read_decays(own, log_decay, p.num_heads, chunk + step, length);
      last.sums[0][0] = decay.last();
    }

    const unsigned keys = base + stage * kStageBytes;
    const unsigned values = keys + kKeyBytes;
    if constexpr (STATES == 2) {
      T* to = y + slot * state_size + column;
      cukit::store_tile<STATE_TILE, kColumns, THREADS, PADDED>(to, p.head_dim, state_tile, 0, p.state_dim,
                                                              columns, threadIdx.x);
    }
    if constexpr (!STATES) {
      const cukit::LeftMK<STATE_TILE> queries(values + kValueBytes, 16 * warp, 0);
      const auto left = [&](unsigned(&r)[4], int, int k) { queries(r, 0, 16 * k); };

      float out[1][kColumnTiles][4];
      cukit::clear(out);
      const cukit::RightKN<kColumns> state(base + 2 * kStageBytes, 0, 0);
      cukit::warp_product<T, STATE_TILE / 16>(
          out, left, [&](unsigned(&r)[4], int n, int k) { state(r, 16 * k, 8 * n); });
      float cumsum[2];
      if constexpr (!CHANNELS) {
        cumsum[0] = decay.cumsum[16 * warp + lane / 4];
        cumsum[1] = decay.cumsum[16 * warp + lane / 4 + 8];
        const float from_start[2] = {exp2f(cumsum[0]), exp2f(cumsum[1])};
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[0][n][i] *= from_start[i / 2];
      }

      // 16 keys per step; steps beyond the warp's rows are fully masked and skipped.
      const cukit::RightNK<STATE_TILE> key_rows(keys, 0, 0);
      const cukit::RightKN<kColumns> value_rows(values, 0, 0);
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        if (step > warp) break;
        unsigned packed[4];
        if constexpr (CHANNELS) {
          cukit::load_scores(packed, scores + slot * (kChunk * kChunk) + 16 * (warp * kChunk + step));
        } else {
          float score[1][2][4];
          cukit::clear(score);
          cukit::warp_product<T, STATE_TILE / 16>(
              score, left, [&](unsigned(&r)[4], int, int k) { key_rows(r, 16 * step, 16 * k); });
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int row = 16 * warp + lane / 4 + 8 * half;
              float decayed[2];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int key = 16 * step + 8 * n + state_column + i;
                decayed[i] =
                    key <= row ? score[0][n][2 * half + i] * exp2f(cumsum[half] - decay.cumsum[key]) : 0.0f;
              }
              packed[2 * n + half] = cukit::pack<T>(decayed[0], decayed[1]);
            }
        }
        cukit::warp_product<T, 1>(
            out,
            [&](unsigned(&r)[4], int, int) {
#pragma unroll
              for (int i = 0; i < 4; ++i) r[i] = packed[i];
            },
            [&](unsigned(&r)[4], int n, int) { value_rows(r, 16 * step, 8 * n); });
      }

      // The shared memory of the warp's queries is reused to stage its outputs for coalesced
      // stores.
      __syncwarp();
      unsigned char* staged =
          memory + stage * kStageBytes + kKeyBytes + kValueBytes + warp * (16 * STATE_TILE * 2);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned char* to = staged + cukit::Swizzle<kColumns>::offset(lane / 4 + 8 * half, n);
          *reinterpret_cast<unsigned*>(to + 2 * state_column) =
              cukit::pack<T>(out[0][n][2 * half], out[0][n][2 * half + 1]);
        }
      __syncwarp();
      const int token = chunk * kChunk + 16 * warp;
      T* to = y + (begin + token) * value_stride + head * p.head_dim + column;
      cukit::store_tile<16, kColumns, kWarpSize, PADDED>(to, value_stride, staged, 0, length - token,
                                                        columns, lane);
    }

    StateValues added;
    if constexpr (kSegments) {
      cukit::clear(added);
    } else {
      const Decay kept = last.factors();
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) h[m][n][i] *= kept.at(m, i / 2);
    }
    // Decay from a token to the end of the chunk, or with REVERSE from the chunk's start to the token.
    const auto decay_of = [&](int token) {
      return exp2f(REVERSE ? decay.cumsum[token] : last.at(0, 0) - decay.cumsum[token]);
    };
    const cukit::LeftKM<STATE_TILE, 16> key_columns(keys, 0, 16 * warp);
    const cukit::RightKN<kColumns> value_rows(values, 0, 0);
    cukit::warp_product<T, kChunk / 16>(
        kSegments ? added : h,
        [&](unsigned(&r)[4], int m, int k) {
          key_columns(r, 16 * k, 64 * m);
          if constexpr (CHANNELS) return;
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int token = 16 * k + 8 * side + state_column;
            const float factor[2] = {decay_of(token), decay_of(token + 1)};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float pair[2];
              cukit::unpack<T>(pair, r[2 * side + i]);
              r[2 * side + i] = cukit::pack<T>(pair[0] * factor[0], pair[1] * factor[1]);
            }
          }
        },
        [&](unsigned(&r)[4], int n, int k) { value_rows(r, 16 * k, 8 * n); });
    if constexpr (kSegments) {
      const Decay factor = total.factors();
#pragma unroll
      for (int m = 0; m < Rows::kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) h[m][n][i] = fmaf(factor.at(m, i / 2), added[m][n][i], h[m][n][i]);
      total.add(last);
      if (total.all_zero()) break;
    } else {
      __syncthreads();  // all warps have read the previous state
      if (more) rows.round<T>(state_tile, h);
    }
  }

  if constexpr (kSegments) {
    cukit::cp_async_wait<0>();
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
