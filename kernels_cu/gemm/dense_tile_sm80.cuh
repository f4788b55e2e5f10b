// One tile of a dense product with an epilogue, on mma.sync: any layout, any alignment.
//
//   out = f(a b^T + bias)                       f: none, ReLU, GELU, SiLU
//   out = f(a gate^T) * (a up^T)                PARTS 2: SwiGLU, GeGLU
//
// With KEEPS the input of f is stored too, for the backward pass.
//
// Mapping: a block computes a TILE_M x TILE_N tile of the product with WARPS_M x WARPS_N warps,
//   which divide its rows and columns. k steps of TILE_K are copied up to STAGES - 1 ahead.
//   PARTS 2: half of a tile's columns belong to gate, half are the same columns of up; each warp
//   has some of both.
// ALIGNED 1: operands are copied with 16-byte cp.async; addresses and strides must be multiples of
//   16 bytes. ALIGNED 0: element by element, through registers.
// Shared memory, dynamic: STAGES * (TILE_M + TILE_N) * TILE_K * 2 bytes, a | b | a | ..
// Macros: DTYPE float16|bfloat16; TILE_M, TILE_N, TILE_K multiples of 32; STAGES 2..; WARPS_M,
//   WARPS_N; THREADS 32 * WARPS_M * WARPS_N; MAJOR_A, MAJOR_B K|MN; ALIGNED 0|1; PARTS 1|2;
//   ACTIVATION NoActivation|Relu|GeluErf|GeluTanh|Silu; KEEPS 0|1.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
#pragma once

#include "common/activation.cuh"
#include "common/platform.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

namespace cukit {

using T = element_t;

enum class Major { K, MN };

// NVRTC has no <type_traits>.
template <bool First, typename A, typename B>
struct Choose { using Type = A; };
template <typename A, typename B>
struct Choose<false, A, B> { using Type = B; };

constexpr int kWarpM = TILE_M / WARPS_M;
constexpr int kWarpN = TILE_N / WARPS_N;  // both parts together
constexpr int kMT = kWarpM / 16;
constexpr int kNT = kWarpN / 8;
constexpr int kPartN = TILE_N / PARTS;  // columns of a tile of the result
constexpr int kWarpPartN = kWarpN / PARTS;
constexpr int kTileBytesA = TILE_M * TILE_K * 2;
constexpr int kStageBytes = kTileBytesA + TILE_N * TILE_K * 2;
constexpr int kGroup = 8;  // tile rows of a rasterisation group

static_assert(THREADS == WARPS_M * WARPS_N * kWarpSize, "one part of the tile per warp");
static_assert(kWarpM % 16 == 0 && kWarpPartN % 16 == 0, "a multiple of the fragment size");

// A matrix in global memory, from the first element of a tile on: `rows` x `columns` elements are
// valid.
struct Source {
  const T* first;
  long long stride;
  int rows, columns;
};

// Copies Rows x Cols elements; those outside the source are zero-filled.
template <int Rows, int Cols>
CUKIT_DEVICE void copy_tile(unsigned char* tile, const Source& from) {
  if constexpr (ALIGNED) {
    TileCopy<Rows, Cols, THREADS, true>::start(shared_address(tile), from.first,
                                                      from.stride, from.rows, from.columns);
  } else {
    constexpr int kChunks = Cols / 8;
    for (int index = threadIdx.x; index < Rows * kChunks; index += THREADS) {
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      Vec<T, 8> vec = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (row < from.rows && chunk * 8 + i < from.columns) {
          vec[i] = from.first[row * from.stride + chunk * 8 + i];
        }
      }
      store(reinterpret_cast<T*>(tile + Swizzle<Cols>::offset(row, chunk)), vec);
    }
  }
}

// Copies [k, k + TILE_K) of an operand, starting at row `first` of a or column `first` of b.
template <Major kMajor, int Extent>
CUKIT_DEVICE void copy_operand(unsigned char* tile, const T* operand, int first, int extent, int k,
                               int depth) {
  if constexpr (kMajor == Major::K) {
    const Source from{operand + static_cast<long long>(first) * depth + k, depth, extent - first,
                      depth - k};
    copy_tile<Extent, TILE_K>(tile, from);
  } else {
    const Source from{operand + static_cast<long long>(k) * extent + first, extent, depth - k,
                      extent - first};
    copy_tile<TILE_K, Extent>(tile, from);
  }
}

// Accumulators: row tile m, column tile n, element 2 half + i: row 16 m + lane / 4 + 8 half, column
// 8 n + 2 (lane % 4) + i of the warp's part of the tile.
using Accumulators = float[kMT][kNT][4];

// Writes column tiles First .. First + Count - 1 of the accumulators to `out` [rows, columns], from
// (row, column) on. `stride`: elements between rows of `out`.
template <int First, int Count>
CUKIT_DEVICE void write(const Accumulators& acc, T* out, long long stride, int row, int column,
                        int rows, int columns) {
  const int lane = threadIdx.x % kWarpSize;
  const bool pairs = stride % 2 == 0 && reinterpret_cast<unsigned long long>(out) % 4 == 0;
#pragma unroll
  for (int m = 0; m < kMT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * m + lane / 4 + 8 * half;
      if (i >= rows) continue;
      T* const to = out + i * stride;
#pragma unroll
      for (int n = 0; n < Count; ++n) {
        const float* pair = &acc[m][First + n][2 * half];
        const int j = column + 8 * n + lane % 4 * 2;
        if (pairs && j + 1 < columns) {
          *reinterpret_cast<unsigned*>(to + j) = pack<T>(pair[0], pair[1]);
        } else {
          if (j < columns) to[j] = from_float<T>(pair[0]);
          if (j + 1 < columns) to[j + 1] = from_float<T>(pair[1]);
        }
      }
    }
}

struct DenseProduct {
  const T* a;     // [m, k]; MN-major: [k, m]
  const T* b;     // [n, k]; MN-major: [k, n]
  const T* up;    // like b; only with PARTS 2
  const T* bias;  // [n], or null
  T* out;         // [m, n]
  T* kept;        // [m, PARTS * n]; only with KEEPS
  int m, n, k;

  CUKIT_DEVICE static int tiles_m(int m) { return (m + TILE_M - 1) / TILE_M; }
  CUKIT_DEVICE static int tiles_n(int n) { return (n + kPartN - 1) / kPartN; }
};

// Computes tile `index`; tiles are numbered column by column within rasterisation groups of kGroup
// tile rows. Called by all threads of the block; `stages` is its dynamic shared memory.
CUKIT_DEVICE void compute_tile(const DenseProduct& p, int index, unsigned char* stages) {
  const int tiles_n = DenseProduct::tiles_n(p.n);
  const int first_m = index / (kGroup * tiles_n) * kGroup;
  const int group_rows = min(kGroup, DenseProduct::tiles_m(p.m) - first_m);
  const int within = index % (kGroup * tiles_n);
  const int row = (first_m + within % group_rows) * TILE_M;
  const int column = within / group_rows * kPartN;

  const int steps = (p.k + TILE_K - 1) / TILE_K;
  const auto copy_step = [&](int step) {
    if (step < steps) {
      unsigned char* const stage = stages + step % STAGES * kStageBytes;
      const int k = step * TILE_K;
      copy_operand<Major::MAJOR_A, TILE_M>(stage, p.a, row, p.m, k, p.k);
      copy_operand<Major::MAJOR_B, kPartN>(stage + kTileBytesA, p.b, column, p.n, k, p.k);
      if constexpr (PARTS == 2) {
        copy_operand<Major::MAJOR_B, kPartN>(stage + kTileBytesA + kPartN * TILE_K * 2, p.up, column,
                                             p.n, k, p.k);
      }
    }
    cp_async_commit();  // commit even an empty group, so that cp_async_wait counts steps
  };

  const int warp = threadIdx.x / kWarpSize;
  const int warp_row = warp % WARPS_M * kWarpM;
  const int warp_column = warp / WARPS_M * kWarpPartN;
  constexpr bool kRowsA = Major::MAJOR_A == Major::K;
  constexpr bool kRowsB = Major::MAJOR_B == Major::K;
  using Left = Choose<kRowsA, LeftMK<TILE_K>, LeftKM<TILE_M, kWarpM>>::Type;
  using Right =
      Choose<kRowsB, RightNK<TILE_K>, RightKN<kPartN, kWarpPartN>>::Type;
  const unsigned base = shared_address(stages);
  const Left left(base, kRowsA ? warp_row : 0, kRowsA ? 0 : warp_row);
  const Right right(base + kTileBytesA, kRowsB ? warp_column : 0, kRowsB ? 0 : warp_column);

  Accumulators acc;
  clear(acc);
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) copy_step(step);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this step has arrived, and the stage of the previous step is free
    copy_step(step + STAGES - 1);
    const int stage = step % STAGES * kStageBytes;
    warp_product<T, TILE_K / 16>(
        acc,
        [&](unsigned (&r)[4], int m, int k) {
          kRowsA ? left(r, 16 * m, 16 * k, stage) : left(r, 16 * k, 16 * m, stage);
        },
        [&](unsigned (&r)[4], int n, int k) {
          constexpr int kPartTiles = kNT / PARTS;
          const int part = n / kPartTiles;
          const int bytes = stage + part * kPartN * TILE_K * 2;
          const int within_part = 8 * (n % kPartTiles);
          kRowsB ? right(r, within_part, 16 * k, bytes) : right(r, 16 * k, within_part, bytes);
        });
  }

  const int lane = threadIdx.x % kWarpSize;
  const int own_column = column + warp_column;
  constexpr int kPartTiles = kNT / PARTS;
  if (p.bias != nullptr) {
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = own_column + 8 * n + lane % 4 * 2 + i;
        const float value = j < p.n ? to_float(p.bias[j]) : 0.0f;
#pragma unroll
        for (int m = 0; m < kMT; ++m) {
          acc[m][n][i] += value;
          acc[m][n][2 + i] += value;
        }
      }
  }
  if constexpr (KEEPS) {
    write<0, kPartTiles>(acc, p.kept, static_cast<long long>(PARTS) * p.n, row + warp_row, own_column,
                         p.m, p.n);
    if constexpr (PARTS == 2) {
      write<kPartTiles, kPartTiles>(acc, p.kept + p.n, 2ll * p.n, row + warp_row, own_column, p.m,
                                    p.n);
    }
  }
#pragma unroll
  for (int m = 0; m < kMT; ++m)
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gate = ACTIVATION<T>::value(acc[m][n][i]);
        acc[m][n][i] = PARTS == 2 ? gate * acc[m][kNT - kPartTiles + n][i] : gate;
      }
  write<0, kPartTiles>(acc, p.out, p.n, row + warp_row, own_column, p.m, p.n);
}

}  // namespace cukit
