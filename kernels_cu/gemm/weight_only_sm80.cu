// Products with a quantised weight on mma.sync: x [tokens, k] times W [rows, k] of int4 or int8
// codes.
//
//   out[m, n] = sum_k x[m, k] scale[n, k / GROUP] (code[n, k] - zero_point[n, k / GROUP]) + bias[n]
//
// Operands are swapped, as in weight_only_sm90.cu: rows of the weight are the 16 rows of mma.sync,
// and tokens its eight columns.
//
// Mapping: a persistent grid computes tiles of CONSUMERS * 64 rows x TOKENS tokens; the tiles of an
//   incomplete last round are split along k (StreamKTiles, common/tile_scheduler.cuh). All
//   threads copy k steps of 128 columns by cp.async, STAGES - 1 steps ahead. Warp w has rows 16 w
//   .. 16 w + 15 of the tile: it decodes its part of the packed weight to operand a
//   (gemm/weight_codes.cuh) and multiplies it by every token.
// Shared memory, bytes: STAGES * round_up(TOKENS * 256 + CONSUMERS * block bytes, 128), dynamic:
//   stages (x, swizzled rows of 256 bytes | blocks of the weight). Static: a word per consumer.
// Macros: those of gemm/weight_only.cuh, with FLOAT8 0, FOLD 0, TOKENS a multiple of 16 and
//   CONSUMERS 2; STAGES 2..; THREADS 128 * CONSUMERS.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_only.cuh"

namespace {

constexpr int kTileBytes = TOKENS * cukit::kBlockColumns * 2;
constexpr int kWeightBytes = CONSUMERS * Weight::kBytes;
constexpr int kStageBytes = (kTileBytes + kWeightBytes + 127) / 128 * 128;  // tiles are aligned

using CopyX = cukit::TileCopy<TOKENS, cukit::kBlockColumns, THREADS, true>;
using OperandX = cukit::RightNK<cukit::kBlockColumns>;

static_assert(THREADS == 128 * CONSUMERS, "four warps for 64 rows");

struct Operands {
  const T* x;
  const unsigned char* weight;
  int tokens, columns, steps, pairs;

  // Issues the copies of a step as one cp.async group, which is empty beyond the tile's last step.
  CUKIT_DEVICE void load(unsigned char* stage, const Tile& tile, int step) const {
    if (step < tile.end_step) {
      const long long row = static_cast<long long>(tile.n) * TOKENS;
      const int column = step * cukit::kBlockColumns;
      CopyX::start(cukit::shared_address(stage), x + row * columns + column, columns,
                   tokens - tile.n * TOKENS, columns - column);
      // Beyond the last rows the last pair is loaded again; its product is not stored.
      const long long pair = min(tile.m, pairs - 1);
      const unsigned char* const from = weight + (pair * steps + step) * kWeightBytes;
      const unsigned to = cukit::shared_address(stage + kTileBytes);
#pragma unroll
      for (int i = 0; i < (kWeightBytes + 16 * THREADS - 1) / (16 * THREADS); ++i) {
        const int offset = (i * THREADS + static_cast<int>(threadIdx.x)) * 16;
        if (offset < kWeightBytes) cukit::cp_async_16(to + offset, from + offset);
      }
    }
    cukit::cp_async_commit();
  }
};

// The four accumulators of a 16 x 8 product.
CUKIT_DEVICE float (&eight_tokens(TileAccumulators& acc, int n))[4] {
  return reinterpret_cast<float(&)[4]>(acc[4 * n]);
}

// One step: acc += W x^T.
CUKIT_DEVICE void multiply(TileAccumulators& acc, TileAccumulators& group_acc,
                           const unsigned char* stage, int consumer) {
  const unsigned char* const block = stage + kTileBytes + consumer * Weight::kBytes;
  const OperandX x(cukit::shared_address(stage), 0, 0);
  TileAccumulators& into = GROUP ? group_acc : acc;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    Operand a;
    decode(a, block, chunk, nullptr);
    if (GROUP && chunk % kGroupChunks == 0) clear(group_acc);
#pragma unroll
    for (int i = 0; i < kChunkSteps; ++i)
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n += 2) {
        unsigned b[4];
        x(b, 8 * n, (chunk * kChunkSteps + i) * 16);
        cukit::mma_16x8x16<T>(eight_tokens(into, n), a[i], b[0], b[1]);
        cukit::mma_16x8x16<T>(eight_tokens(into, n + 1), a[i], b[2], b[3]);
      }
    if (GROUP && (chunk + 1) % kGroupChunks == 0) {
      float scale[2];
      Weight::scales(scale, block, chunk / kGroupChunks);
      add_scaled(acc, group_acc, scale);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) weight_only_sm80(
    const T* __restrict__ x,                   // [tokens, columns]
    const unsigned char* __restrict__ weight,  // [ceil(rows / 128)][steps][2][block bytes]
    const Scale* __restrict__ scales,          // GROUP 0: [rows]
    const T* __restrict__ bias,                // [rows] or null
    T* __restrict__ out,                       // [tokens, rows]
    float4* __restrict__ pieces,               // as in StreamKFixup, or null without partial tiles
    int* __restrict__ arrivals,                // as in StreamKFixup, or null
    const cukit::WeightOnlyParameters p) {
  __shared__ int last[CONSUMERS];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  constexpr int kTileRows = CONSUMERS * cukit::kBlockRows;
  const int tiles_m = (p.rows + kTileRows - 1) / kTileRows;
  const Schedule schedule{{tiles_m, (p.tokens + TOKENS - 1) / TOKENS, p.raster_group, p.steps, 1},
                          p.whole_tiles};
  const int consumer = threadIdx.x / 128;
  const Operands operands{x, weight, p.tokens, p.columns, p.steps, tiles_m};
  const Epilogue epilogue{bias, scales, nullptr, 0, p.tokens, p.rows};
  const StreamKFixup shared{schedule, pieces, arrivals, last + consumer, p.tokens, consumer};

  Tile tile;
  for (int turn = 0; schedule.tile(turn, tile); ++turn) {
    TileAccumulators acc, group_acc;
    clear(acc);
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
      operands.load(stages + ahead * kStageBytes, tile, tile.first_step + ahead);
    }
    int index = 0;
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      cukit::cp_async_wait<STAGES - 2>();
      __syncthreads();  // this step has arrived, and the previous step's stage is free
      const int free = index == 0 ? STAGES - 1 : index - 1;
      operands.load(stages + free * kStageBytes, tile, step + STAGES - 1);
      multiply(acc, group_acc, stages + index * kStageBytes, consumer);
      index = index + 1 == STAGES ? 0 : index + 1;
    }
    __syncthreads();  // all stages are free
    if (shared.complete(acc, tile)) {
      const int row = first_row(tile, consumer);
      epilogue.finish(acc, row, tile.n * TOKENS);
      epilogue.store(out, acc, row, tile.n * TOKENS);
    }
  }
}
