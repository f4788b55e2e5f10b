// Products of 8-bit matrices on mma.sync (Ampere and later; float8: Ada and later): int8 and float8
// (e4m3), with scales per tensor, row or block.
//
//   out = (a - zero_point) b^T * a_scale * b_scale + bias
//
// Mapping: a block computes a TILE_M x TILE_N tile of the result, in rasterisation groups of
//   `raster_group` tile rows (common/tile_scheduler.cuh). Eight warps, 2 along m and 4 along n,
//   multiply with mma.sync; cp.async loads k steps of 128, up to STAGES - 1 ahead.
// PARTIALS 1: float8 sums over 128 of k are added in float; with BLOCKS 1, after multiplication by
//   the scales of 128 elements of a row of a and of a 128 x 128 block of b. PARTIALS 0: one sum
//   over all of k, for int8.
// Shared memory, bytes: STAGES * (TILE_M + TILE_N) * 128, dynamic: stages (a | b), rows of 128
//   bytes in swizzled chunks of 16 (common/tile.cuh).
// Macros: CODE Int8|Float8E4M3; OUT float16|bfloat16|float32|int32 (int32: the sums of int8);
//   TILE_M a multiple of 32; TILE_N a multiple of 64 that divides 128; STAGES 2..; PARTIALS 0|1;
//   BLOCKS 0|1; THREADS 256.
// Minimum architecture: sm_80; Float8E4M3 sm_89. Accumulates in a fixed order: deterministic.
// Reference: cukit/reference/gemm_8bit.py.
#include "common/codes.cuh"
#include "common/index.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mma_narrow.cuh"
#include "common/quant/scaled_result.cuh"
#include "common/tile.cuh"
#include "common/tile_scheduler.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using Code = cukit::CODE;
using Out = cukit::OUT;
using Sum = cukit::AccumulatorOf<Code>::Type;

constexpr int kTileK = 128;
constexpr int kWarpsN = 4;
constexpr int kRowTiles = TILE_M / 2 / 16;             // per warp
constexpr int kColumnTiles = TILE_N / kWarpsN / 8;     // per warp
constexpr int kStageBytes = (TILE_M + TILE_N) * kTileK;
using Rows = cukit::Swizzle<kTileK / 2>;  // in 16-bit elements
// sm_100 widens float8 fragments to 16 bits before the MMA. With all steps unrolled, the widened
// fragments and both sets of accumulators do not fit into registers.
constexpr int kUnrollK = __CUDA_ARCH__ / 100 == 10 && PARTIALS ? 1 : kTileK / 32;

static_assert(THREADS == 256 && TILE_M % 32 == 0, "eight warps");
static_assert(TILE_N % 64 == 0 && 128 % TILE_N == 0, "a tile's columns share a block of scales");
static_assert(!BLOCKS || PARTIALS, "scales per block need partial sums");

using Accumulators = Sum[kRowTiles][4 * kColumnTiles];

CUKIT_DEVICE void multiply_tile(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  cukit::mma_16x8x32_s8(d, a, b);
}
#if __CUDA_ARCH__ >= 890
CUKIT_DEVICE void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  cukit::mma_16x8x32_e4m3(d, a, b);
}
#endif

// Starts copying RowsOfTile rows of 128 bytes; elements outside [rows, k] are zero-filled.
template <int RowsOfTile>
CUKIT_DEVICE void copy_rows(unsigned tile, const unsigned char* from, long long row_stride, int rows,
                            int k) {
#pragma unroll
  for (int i = 0; i < RowsOfTile * 8 / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / 8;
    const int chunk = threadIdx.x % 8;
    const int present = row < rows ? min(16, max(0, k - 16 * chunk)) : 0;
    cukit::cp_async_16_partial(tile + Rows::offset(row, chunk),
                               present > 0 ? from + row * row_stride + 16 * chunk : from, present);
  }
}

// Adds this warp's part of a stage's product, over 128 of k, to `acc`.
CUKIT_DEVICE void multiply_stage(Accumulators& acc, unsigned stage, int warp_row, int warp_column) {
  const cukit::LeftMK<kTileK / 2> left(stage, warp_row, 0);
  const cukit::RightNK<kTileK / 2> right(stage + TILE_M * kTileK, warp_column, 0);
#pragma unroll kUnrollK
  for (int k = 0; k < kTileK / 32; ++k) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) left(a[m], 16 * m, 16 * k);
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      unsigned b[4];
      right(b, 8 * n, 16 * k);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Sum(&tile)[4] = reinterpret_cast<Sum(&)[4]>(acc[m][4 * (n + i)]);
          const unsigned columns[2] = {b[2 * i], b[2 * i + 1]};
          multiply_tile(tile, a[m], columns);
        }
    }
  }
}

CUKIT_DEVICE void clear(Accumulators& acc) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int i = 0; i < 4 * kColumnTiles; ++i) acc[m][i] = 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_8bit_sm80(
    const unsigned char* __restrict__ a,  // [m, k], rows a_row_bytes apart
    const unsigned char* __restrict__ b,  // [n, k], rows b_row_bytes apart
#if BLOCKS
    const float* __restrict__ a_scales,  // [ceil(k / 128), m], rows a_stride apart
    const float* __restrict__ b_scales,  // [ceil(n / 128), ceil(k / 128)]
#else
    const float* __restrict__ a_scales,           // [m], [1] or null: 1
    const float* __restrict__ b_scales,           // [n], [1] or null: 1
    const signed char* __restrict__ zero_points,  // like a_scales, or null: 0
    const int* __restrict__ column_sums,          // [n]: sums of b along k; with zero_points
#endif
    const Out* __restrict__ bias,  // [n] or null
    Out* __restrict__ out,         // [m, n]
    const cukit::QuantizedParameters p, const cukit::RowStrides rows) {
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::GemmParameters& size = p.linear.gemm;
  const cukit::MatrixTiles tiles{(size.m + TILE_M - 1) / TILE_M, (size.n + TILE_N - 1) / TILE_N,
                                 size.raster_group, size.steps, 1};
  const cukit::MatrixTile tile = tiles.at(blockIdx.x);
  const int row = tile.m * TILE_M;
  const int column = tile.n * TILE_N;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp_row = warp / kWarpsN * (TILE_M / 2);
  const int warp_column = warp % kWarpsN * (TILE_N / kWarpsN);
  const int own_row = row + warp_row + lane / 4;
  const int own_column = column + warp_column + lane % 4 * 2;
  const unsigned shared = cukit::shared_address(stages);

  const auto load = [&](int step) {
    if (step < size.steps) {
      const unsigned stage = shared + step % STAGES * kStageBytes;
      const int first = step * kTileK;
      copy_rows<TILE_M>(stage, a + row * rows.a_row_bytes + first, rows.a_row_bytes, size.m - row,
                        rows.k - first);
      copy_rows<TILE_N>(stage + TILE_M * kTileK, b + column * rows.b_row_bytes + first,
                        rows.b_row_bytes, size.n - column, rows.k - first);
    }
    cukit::cp_async_commit();  // commit even an empty group, so that cp_async_wait counts steps
  };

  Accumulators acc;
  clear(acc);
  for (int step = 0; step < STAGES - 1; ++step) load(step);
  for (int step = 0; step < size.steps; ++step) {
    cukit::cp_async_wait<STAGES - 2>();
    __syncthreads();  // this step has arrived, and the stage of the previous step is free
    load(step + STAGES - 1);
    const unsigned stage = shared + step % STAGES * kStageBytes;
#if PARTIALS
    Accumulators partial;
    clear(partial);
    multiply_stage(partial, stage, warp_row, warp_column);
#if BLOCKS
    const float column_scale =
        b_scales[static_cast<long long>(column / kTileK) * size.steps + step];
#endif
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float factor = 1.0f;
#if BLOCKS
        const int at = own_row + 16 * m + 8 * half;
        factor = at < size.m
                     ? column_scale * a_scales[static_cast<long long>(step) * p.a_stride + at]
                     : 0.0f;
#endif
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int element = 4 * n + 2 * half + i;
            acc[m][element] += factor * partial[m][element];
          }
      }
#else
    multiply_stage(acc, stage, warp_row, warp_column);
#endif
  }

#if BLOCKS
  const cukit::ScaledResult<Out> result{{nullptr, 0}, {nullptr, 0}, nullptr, nullptr,
                                        bias,         out,          size.m,  size.n};
#else
  const cukit::ScaledResult<Out> result{
      {a_scales, p.a_stride}, {b_scales, p.b_stride}, zero_points, column_sums,
      bias,                   out,                    size.m,      size.n};
#endif
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    constexpr int kElements = 4 * kColumnTiles;
    if constexpr (cukit::kIsExact<Out>) {
      result.write_pairs<kElements>(acc[m], 0, own_row + 16 * m, own_column, size.n);
    } else {
      float values[kElements];
      result.scale(values, acc[m], 0, own_row + 16 * m, own_column);
      result.write_pairs<kElements>(values, 0, own_row + 16 * m, own_column, size.n);
    }
  }
}
