// The blocks of a dense product that are in a pattern (sampled product), on mma.sync.
//
//   values[number of (i, j)] = block (i, j) of op(a) op(b)     for each block of the pattern
//
// Mapping: one block per 128 x 128 tile (gemm/bsr_sm80.cuh): 128 / BLOCK adjacent block rows, and
//   up to 128 / BLOCK block columns that any of these rows uses, gathered side by side. Blocks of
//   the tile that are not in the pattern are not multiplied, although their operands are loaded.
// Shared memory, bytes: STAGES * 32768, dynamic: stages (a | b).
// Macros: DTYPE float16|bfloat16; BLOCK 16|32|64|128; A_TRANSPOSED, B_TRANSPOSED 0|1; STAGES 2..;
//   THREADS 256.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/bsr.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/bsr_sm80.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using TileA = cukit::BsrOperandTile<A_TRANSPOSED>;
using TileB = cukit::BsrOperandTile<!B_TRANSPOSED>;

constexpr int kSlots = cukit::kBsrTile / BLOCK;  // block rows, and block columns, of a tile
constexpr int kPairs = cukit::kBsrColumnTiles / 2;
constexpr unsigned kPairMask = (1u << kPairs) - 1;

static_assert(THREADS == cukit::kBsrThreads, "eight warps");

// For lane m * kPairs + pair, the index of the block that contains row tile m and column tile pair
// `pair` of the warp, or -1 if the pattern does not have that block.
CUKIT_DEVICE int find_block(const int* block_indices, int entry, int end) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int slot = (cukit::bsr_warp_row() + lane / kPairs * 16) / BLOCK;
  const int at = entry + (cukit::bsr_warp_column() + lane % kPairs * 16) / BLOCK;
  const bool exists = lane < cukit::kBsrRowTiles * kPairs && at < end;
  return exists ? block_indices[static_cast<long long>(at) * kSlots + slot] : -1;
}

// `bits`: mask of the lanes for which find_block found a block.
CUKIT_DEVICE void multiply_stage(cukit::BsrAccumulators& acc, const cukit::BsrLeft<A_TRANSPOSED>& a,
                                 const cukit::BsrRight<!B_TRANSPOSED>& b, unsigned bits, int bytes) {
  if (bits == 0) return;
#pragma unroll
  for (int k = 0; k < cukit::kBsrTileK; k += 16) {
    unsigned right[kPairs][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) b.load(right[pair], 16 * pair, k, bytes);
#pragma unroll
    for (int m = 0; m < cukit::kBsrRowTiles; ++m) {
      if ((bits >> (m * kPairs) & kPairMask) == 0) continue;
      unsigned left[4];
      a.load(left, 16 * m, k, bytes);
#pragma unroll
      for (int n = 0; n < cukit::kBsrColumnTiles; ++n) {
        if (bits >> (m * kPairs + n / 2) & 1) {
          cukit::mma_16x8x16<T>(acc[m][n], left, right[n / 2][n % 2 * 2],
                                right[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
}

CUKIT_DEVICE void store_blocks(const cukit::BsrAccumulators& acc, T* values, int block_index) {
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int m = 0; m < cukit::kBsrRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < cukit::kBsrColumnTiles; ++n) {
      const int block = __shfl_sync(cukit::kFullMask, block_index, m * kPairs + n / 2);
      if (block < 0) continue;
      const int row = (cukit::bsr_warp_row() + 16 * m) % BLOCK + lane / 4;
      const int column = (cukit::bsr_warp_column() + 8 * n) % BLOCK + lane % 4 * 2;
      T* const to = values + (static_cast<long long>(block) * BLOCK + row) * BLOCK + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<unsigned*>(to + 8 * half * BLOCK) =
            cukit::pack<T>(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
      }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) bsr_sampled_sm80(
    const T* __restrict__ a,          // [m, k]; A_TRANSPOSED [k, m]
    const T* __restrict__ b,          // [k, n]; B_TRANSPOSED [n, k]
    T* __restrict__ values,           // [blocks, BLOCK, BLOCK]
    const int4* __restrict__ work,    // [gridDim.x]: group of block rows, entry begin and end, 0
    const int* __restrict__ columns,  // [entries]: block column
    const int* __restrict__ block_indices,  // [entries, kSlots]: of the row's block there, or -1
    const cukit::BsrParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const unsigned stages = cukit::shared_address(shared);
  const int4 tile = work[blockIdx.x];
  const int first_row = tile.x * cukit::kBsrTile;
  const int block_index = find_block(block_indices, tile.y, tile.z);
  const unsigned bits = __ballot_sync(cukit::kFullMask, block_index >= 0);
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int lane_column = tile.y + lane < tile.z ? columns[tile.y + lane] : -1;

  const cukit::BsrLeft<A_TRANSPOSED> left(stages);
  const cukit::BsrRight<!B_TRANSPOSED> right(stages + cukit::kBsrOperandBytes);
  cukit::BsrAccumulators acc;
  cukit::clear(acc);
  cukit::bsr_stages<STAGES>(
      (p.k + cukit::kBsrTileK - 1) / cukit::kBsrTileK,
      [&](int stage, int buffer) {
        const unsigned at_stage = stages + buffer * cukit::kBsrStageBytes;
        const int first_k = stage * cukit::kBsrTileK;
        TileA::for_chunks(at_stage, [&](unsigned at, int tile_row, int tile_k) {
          const long long row = first_row + tile_row, k = first_k + tile_k;
          const bool inside = row < p.m && k < p.k;
          const long long element = A_TRANSPOSED ? k * p.m + row : row * p.k + k;
          cukit::cp_async_16(at, a + (inside ? element : 0), inside);
        });
        TileB::for_chunks(at_stage + cukit::kBsrOperandBytes,
                          [&](unsigned at, int tile_column, int tile_k) {
          const int block = __shfl_sync(cukit::kFullMask, lane_column, tile_column / BLOCK);
          const long long column = block * static_cast<long long>(BLOCK) + tile_column % BLOCK;
          const long long k = first_k + tile_k;
          const bool inside = block >= 0 && k < p.k;
          const long long element = B_TRANSPOSED ? column * p.k + k : k * p.n + column;
          cukit::cp_async_16(at, b + (inside ? element : 0), inside);
        });
      },
      [&](int, int buffer) {
        multiply_stage(acc, left, right, bits, buffer * cukit::kBsrStageBytes);
      });
  store_blocks(acc, values, block_index);
}
