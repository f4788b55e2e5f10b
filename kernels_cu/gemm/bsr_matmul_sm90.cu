// Block-sparse times dense on Hopper: persistent blocks, TMA, wgmma.
//
//   out = op(s) op(d)             s: block-sparse, d: dense
//   out = (op(s) op(d))^T         OUT_TRANSPOSED: for a dense matrix times a sparse one
//
// Mapping: a tile of the result has COLUMNS columns and the rows of a group of block rows of op(s),
//   a single one if blocks have 64 rows or more (gemm/bsr_sm90.cuh). An entry of a group is a block
//   column in which any of its rows has a block. A thread of the first warpgroup loads the blocks
//   of each entry and the rows of op(d) that they multiply, TILE_K of k at a time, up to STAGES
//   ahead and across tiles. Missing blocks have index -1 and are loaded from a block of zeros. An
//   empty group gets the extra entry after the last one: it has no blocks, and its rows of d are
//   out of bounds, where TMA reads zeros. The host assigns tiles to the blocks of the grid so that
//   all finish at about the same time; concurrent tiles share their columns of d, which stay in
//   L2.
// CLUSTER 2: two adjacent blocks compute tiles side by side. Each loads half of the sparse block
//   that both multiply, and TMA multicasts it to both.
// Shared memory, bytes, dynamic: STAGES * (rows + COLUMNS) * TILE_K * 2 + 2 * buffers * 64 * 64 *
//   2, with rows = max(64, BLOCK): stages (a | b), then 64 x 64 buffers for stores of out, two for
//   each consumer if it has more than 64 columns, else one; all swizzled. Static: two barriers per
//   stage.
// Macros: DTYPE float16|bfloat16; BLOCK 16|32|64|128; COLUMNS a multiple of 128 up to 512, or 256
//   (BLOCK 128); TILE_K 16|32|64, at most BLOCK; SPARSE_TRANSPOSED, DENSE_TRANSPOSED,
//   OUT_TRANSPOSED 0|1; STAGES 2..; CLUSTER 1, or 2 if BLOCK is 64 or 128; THREADS 384.
// Tensor maps, swizzled by the bytes of their boxes' rows: values [blocks * BLOCK, BLOCK], boxes of
//   [BLOCK, TILE_K], SPARSE_TRANSPOSED [TILE_K, up to 64], with CLUSTER 2 of half the rows; d,
//   boxes of [TILE_K, 64] from [k, n], DENSE_TRANSPOSED [columns of a consumer, TILE_K] from [n,
//   k]; out, boxes of [64, 64].
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/bsr.py.
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/types.cuh"
#include "gemm/bsr_sm90.cuh"

namespace {

using T = cukit::element_t;
constexpr int kBlockSteps = BLOCK / TILE_K;

using Shape = cukit::BsrShape<T, BLOCK, COLUMNS, TILE_K, SPARSE_TRANSPOSED, (BLOCK < 64 ? BLOCK : 64),
                              !DENSE_TRANSPOSED, 64>;

static_assert(BLOCK % TILE_K == 0, "a stage does not span two blocks along k");
static_assert(CLUSTER == 1 || Shape::kSlots == 1, "a cluster shares one block at a time");

struct Tile {
  int row;     // first row of op(s)
  int column;  // first column of op(d)
  int entry;   // first of the group's entries
  int first_step, end_step;

  CUKIT_DEVICE static Tile of(const int4& item) {
    const int rank = CLUSTER > 1 ? cukit::cluster_rank() : 0;
    return {item.x * Shape::kRows, item.y + rank * COLUMNS, item.z, 0,
            (item.w - item.z) * kBlockSteps};
  }
};

struct Operands {
  using WorkTile = Tile;
  static constexpr int kStageBytes = Shape::kStageBytes;
  using TileA = Shape::TileA::Tile;
  using TileB = Shape::TileB::Tile;
  const cukit::TensorMap* values;
  const cukit::TensorMap* zeros;
  const cukit::TensorMap* dense;
  const int* block_columns;
  const int* numbers;
  int columns;  // of op(d)

  CUKIT_DEVICE int bytes(const Tile&) const { return kStageBytes; }

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
    const int entry = tile.entry + step / kBlockSteps;
    const int within = step % kBlockSteps * TILE_K;
    load_dense(stage + TileA::kBytes, full, tile.column, block_columns[entry] * BLOCK + within);
#pragma unroll
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      const int number = numbers[entry * Shape::kSlots + slot];
      const cukit::TensorMap* const from = number < 0 ? zeros : values;
      const int row = max(number, 0) * BLOCK;
      if constexpr (CLUSTER > 1) {
        constexpr int kShare = TileA::kRows / CLUSTER;
        TileA::template load_multicast<kShare>(stage, from, full, SPARSE_TRANSPOSED ? 0 : within,
                                               SPARSE_TRANSPOSED ? row + within : row,
                                               cukit::cluster_rank() * kShare, (1 << CLUSTER) - 1);
      } else if constexpr (SPARSE_TRANSPOSED) {
        constexpr int kParts = TileA::kParts / Shape::kSlots;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          cukit::tma_load_2d(stage + (slot * kParts + part) * TileA::kPartBytes, from, full,
                             part * TileA::kPartColumns, row + within);
        }
      } else {
        cukit::tma_load_2d(stage + slot * BLOCK * TileA::kRowBytes, from, full, within, row);
      }
    }
  }

  CUKIT_DEVICE void load_dense(unsigned char* stage_b, cukit::Mbarrier* full, int first_column,
                               int k) const {
#pragma unroll
    for (int group = 0; group < Shape::kColumnGroups; ++group) {
      unsigned char* const b = stage_b + group * TileB::kBytes;
      const int column = first_column + group * Shape::kWidth;
      // Columns beyond the matrix are computed from column 0 but not stored.
      if constexpr (DENSE_TRANSPOSED) {
        TileB::load(b, dense, full, k, column < columns ? column : 0);
      } else {
#pragma unroll
        for (int part = 0; part < TileB::kParts; ++part) {
          const int first = column + part * 64;
          cukit::tma_load_2d(b + part * TileB::kPartBytes, dense, full, first < columns ? first : 0,
                             k);
        }
      }
    }
  }
};

using Store = cukit::PieceStore<T, Shape::kWidth, 64, OUT_TRANSPOSED>;

struct Epilogue {
  unsigned char* buffers;
  const cukit::TensorMap* out;
  int columns;  // of op(d)
  int consumer;

  CUKIT_DEVICE void store(const float (&acc)[Shape::kWidth / 2], const Tile& tile) const {
    const int row = tile.row + Shape::row_group(consumer) * cukit::kWarpgroupRows;
    const int first_column = tile.column + Shape::column_group(consumer) * Shape::kWidth;
    Store::store(acc, buffers + consumer * Store::kBytes, 1 + consumer,
                 [&](int piece, const unsigned char* buffer) {
                   const int column = first_column + piece * 64;
                   if (column >= columns) return;
                   if constexpr (OUT_TRANSPOSED) {
                     cukit::tma_store_2d(out, buffer, row, column);
                   } else {
                     cukit::tma_store_2d(out, buffer, column, row);
                   }
                 });
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, 1) bsr_matmul_sm90(
    const __grid_constant__ cukit::TensorMap values,  // [blocks * BLOCK, BLOCK]
    const __grid_constant__ cukit::TensorMap zeros,   // [BLOCK, BLOCK] of zeros
    const __grid_constant__ cukit::TensorMap dense,   // [k, n]; DENSE_TRANSPOSED [n, k]
    const __grid_constant__ cukit::TensorMap out,     // [m, n]; OUT_TRANSPOSED [n, m]
    const int4* __restrict__ work,     // [clusters of the grid, turns]: group, first column, entry
                                       // begin and end
    const int* __restrict__ block_columns,  // [entries + 1]: of op(s)
    const int* __restrict__ numbers,        // [entries + 1, kSlots]: index of a row's block, or -1
    const int n, const int turns) {
  const Operands operands{&values, &zeros, &dense, block_columns, numbers, n};
  cukit::multiply_listed<Shape, STAGES, CLUSTER>(
      work, turns, operands, [&](unsigned char* buffers, int consumer) {
        return Epilogue{buffers, &out, n, consumer};
      });
}
