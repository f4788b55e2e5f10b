// Block-sparse times dense, on mma.sync.
//
//   out = op(s) op(d)             s: block-sparse, d: dense
//   out = (op(s) op(d))^T         OUT_TRANSPOSED: for a dense matrix times a sparse one
//
// Mapping: one block per 128 x 128 tile (gemm/bsr_sm80.cuh); tiles of the same columns are
//   adjacent, longest groups of rows first. An entry of a group is a block column in which any of
//   the group's rows has a block. A stage holds 64 of k: 64 / BLOCK entries, or half an entry if
//   BLOCK is 128.
// Shared memory, bytes: STAGES * 32768, dynamic: stages (a | b), reused for the tile of out; 4 *
//   STAGES, static.
// Macros: DTYPE float16|bfloat16; BLOCK 16|32|64|128; SPARSE_TRANSPOSED, DENSE_TRANSPOSED,
//   OUT_TRANSPOSED 0|1; STAGES 2..; THREADS 256.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/bsr.py.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/bsr_sm80.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using TileA = cukit::BsrOperandTile<SPARSE_TRANSPOSED>;
using TileB = cukit::BsrOperandTile<!DENSE_TRANSPOSED>;
using OutTile = cukit::Swizzle<cukit::kBsrTile>;

constexpr int kSlots = cukit::kBsrTile / BLOCK;                                       // block rows
constexpr int kStageEntries = BLOCK < cukit::kBsrTileK ? cukit::kBsrTileK / BLOCK : 1;
constexpr int kEntryStages = BLOCK > cukit::kBsrTileK ? BLOCK / cukit::kBsrTileK : 1;

static_assert(THREADS == cukit::kBsrThreads, "eight warps");
static_assert(kStageEntries * kSlots <= cukit::kWarpSize, "one lane per block of a stage");

// The entries of a stage, distributed over the lanes of each warp.
struct StageEntries {
  int block_index;  // of block (entry lane / kSlots, slot lane % kSlots), or -1
  int column;       // block column of entry `lane`

  CUKIT_DEVICE StageEntries(const int* columns, const int* block_indices, int entry, int end) {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const bool exists = lane < kStageEntries * kSlots && entry + lane / kSlots < end;
    block_index = exists ? block_indices[static_cast<long long>(entry) * kSlots + lane] : -1;
    column = lane < kStageEntries && entry + lane < end ? columns[entry + lane] : -1;
  }
};

// Starts the copies of a stage. `within`: offset along k into the entry's blocks.
CUKIT_DEVICE void start_stage(unsigned stage, const T* values, const T* dense, int within,
                              const StageEntries& entries, int first_column,
                              const cukit::BsrParameters& p) {
  TileA::for_chunks(stage, [&](unsigned at, int row, int k) {
    const int block_index =
        __shfl_sync(cukit::kFullMask, entries.block_index, k / BLOCK * kSlots + row / BLOCK);
    const int block_row = row % BLOCK, block_k = k % BLOCK + within;
    if (block_index >= 0) {
      const int element = SPARSE_TRANSPOSED ? block_k * BLOCK + block_row : block_row * BLOCK + block_k;
      cukit::cp_async_16(
          at, values + static_cast<long long>(block_index) * BLOCK * BLOCK + element);
    }
  });
  TileB::for_chunks(stage + cukit::kBsrOperandBytes, [&](unsigned at, int tile_column, int k) {
    const int block = __shfl_sync(cukit::kFullMask, entries.column, k / BLOCK);
    const int column = first_column + tile_column;
    const long long position = static_cast<long long>(block) * BLOCK + k % BLOCK + within;
    if (block >= 0) {
      const bool inside = column < p.n;
      const long long element = DENSE_TRANSPOSED ? column * static_cast<long long>(p.k) + position
                                                 : position * p.n + column;
      cukit::cp_async_16(at, dense + (inside ? element : 0), inside);
    }
  });
}

// `bits`: mask of the stage's stored blocks, in the lane order of StageEntries.
CUKIT_DEVICE void multiply_stage(cukit::BsrAccumulators& acc, const cukit::BsrLeft<SPARSE_TRANSPOSED>& a,
                                 const cukit::BsrRight<!DENSE_TRANSPOSED>& b, unsigned bits, int bytes) {
  const int warp_row = cukit::bsr_warp_row();
#pragma unroll
  for (int k = 0; k < cukit::kBsrTileK; k += 16) {
    const unsigned rows = bits >> (k / BLOCK * kSlots);  // by slot
    constexpr int kWarpSlots = BLOCK < cukit::kBsrWarpRows ? cukit::kBsrWarpRows / BLOCK : 1;
    constexpr unsigned kWarpMask = (1u << kWarpSlots) - 1;
    if ((rows >> (warp_row / BLOCK) & kWarpMask) == 0) continue;
    unsigned right[cukit::kBsrColumnTiles / 2][4];
#pragma unroll
    for (int pair = 0; pair < cukit::kBsrColumnTiles / 2; ++pair) b.load(right[pair], 16 * pair, k, bytes);
#pragma unroll
    for (int m = 0; m < cukit::kBsrRowTiles; ++m) {
      if ((rows >> ((warp_row + 16 * m) / BLOCK) & 1) == 0) continue;
      unsigned left[4];
      a.load(left, 16 * m, k, bytes);
#pragma unroll
      for (int n = 0; n < cukit::kBsrColumnTiles; ++n) {
        cukit::mma_16x8x16<T>(acc[m][n], left, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

// Writes the warp's accumulators to the tile of out, [128][128] in the result's rows and columns.
CUKIT_DEVICE void write_tile(const cukit::BsrAccumulators& acc, unsigned char* tile) {
  const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
  for (int m = 0; m < cukit::kBsrRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < cukit::kBsrColumnTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = cukit::bsr_warp_row() + 16 * m + 8 * half + lane / 4;
        const int column = cukit::bsr_warp_column() + 8 * n + lane % 4 * 2;
        const float* pair = &acc[m][n][2 * half];
        if constexpr (OUT_TRANSPOSED) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<T*>(tile + OutTile::offset(column + i, row / 8) + row % 8 * 2) =
                cukit::from_float<T>(pair[i]);
          }
        } else {
          *reinterpret_cast<unsigned*>(tile + OutTile::offset(row, column / 8) + column % 8 * 2) =
              cukit::pack<T>(pair[0], pair[1]);
        }
      }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) bsr_matmul_sm80(
    const T* __restrict__ values,      // [blocks, BLOCK, BLOCK]
    const T* __restrict__ dense,       // [k, n]; DENSE_TRANSPOSED [n, k]
    T* __restrict__ out,               // [m, n]; OUT_TRANSPOSED [n, m]
    const int* __restrict__ order,     // [groups]: groups of kSlots block rows, longest first
    const int* __restrict__ starts,    // [groups + 1]: entries before each group
    const int* __restrict__ columns,   // [entries]: block column
    const int* __restrict__ block_indices,  // [entries, kSlots]: of the row's block there, or -1
    const cukit::BsrParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  __shared__ unsigned stage_bits[STAGES];
  const unsigned stages = cukit::shared_address(shared);
  const int group = order[blockIdx.x % p.groups];
  const int first_row = group * cukit::kBsrTile;
  const int first_column = static_cast<int>(blockIdx.x) / p.groups * cukit::kBsrTile;
  const int first = starts[group], end = starts[group + 1];

  const cukit::BsrLeft<SPARSE_TRANSPOSED> a(stages);
  const cukit::BsrRight<!DENSE_TRANSPOSED> b(stages + cukit::kBsrOperandBytes);
  cukit::BsrAccumulators acc;
  cukit::clear(acc);
  const auto entry_of = [&](int stage) { return first + stage / kEntryStages * kStageEntries; };
  // Indices are read one stage early, so that copies do not wait for them.
  StageEntries ahead(columns, block_indices, entry_of(0), end);
  cukit::bsr_stages<STAGES>(
      (end - first + kStageEntries - 1) / kStageEntries * kEntryStages,
      [&](int stage, int buffer) {
        const StageEntries entries = ahead;
        ahead = StageEntries(columns, block_indices, entry_of(stage + 1), end);
        const unsigned bits = __ballot_sync(cukit::kFullMask, entries.block_index >= 0);
        if (threadIdx.x == 0) stage_bits[buffer] = bits;
        start_stage(stages + buffer * cukit::kBsrStageBytes, values, dense,
                    stage % kEntryStages * cukit::kBsrTileK, entries, first_column, p);
      },
      [&](int, int buffer) {
        multiply_stage(acc, a, b, stage_bits[buffer], buffer * cukit::kBsrStageBytes);
      });

  __syncthreads();  // all warps have read the last stage
  write_tile(acc, shared);
  __syncthreads();
  const int rows = OUT_TRANSPOSED ? p.n : p.m, row = OUT_TRANSPOSED ? first_column : first_row;
  const int width = OUT_TRANSPOSED ? p.m : p.n, column = OUT_TRANSPOSED ? first_row : first_column;
  cukit::store_tile<cukit::kBsrTile, cukit::kBsrTile, THREADS, true>(
      out + static_cast<long long>(row) * width + column, width, shared, 0, rows - row, width - column,
      threadIdx.x);
}
