// Block-sparse times dense on Hopper: persistent blocks, TMA, wgmma.
//
//   out = op(s) op(d)             s: block-sparse, d: dense
//   out = (op(s) op(d))^T         OUT_TRANSPOSED: for a dense matrix times a sparse one
//
// Mapping: a tile of the result has COLUMNS columns and the rows of a group of block rows of op(s),
//   a single one if blocks have 64 rows or more (gemm/bsr_sm90.cuh). An entry of a group is a block
//   column in which any of the group's rows has a block. A warp of the first warpgroup loads the
//   blocks of each entry and the rows of op(d) that they multiply, TILE_K of k at a time (a part of
//   an entry, or several entries), up to STAGES ahead and across tiles. Missing blocks have index
//   -1. The host pads groups to whole stages with entries that have no blocks and whose rows of d
//   are out of bounds, where TMA reads zeros; an empty group uses padding after the last entry. The
//   host assigns tiles to the blocks of the grid so that all finish at about the same time;
//   concurrent tiles share their columns of d, which stay in L2.
// Missing blocks of 16 are loaded from beyond the last block, where TMA writes zeros without
//   reading memory. With larger blocks or DENSE_TRANSPOSED, reading zeros from memory is faster;
//   the loads cycle through many blocks of zeros, because a single one would be in one slice of L2.
// CLUSTER 2: two adjacent blocks compute tiles side by side. Each loads half of the sparse block
//   that both multiply, and TMA multicasts it to both.
// Shared memory, bytes, dynamic: STAGES * (rows + COLUMNS) * TILE_K * 2 + 2 * buffers * 64 * 64 *
//   2, with rows = max(64, BLOCK): stages (a | b), then 64 x 64 buffers for stores of out, two for
//   each consumer if it has more than 64 columns, else one; all swizzled. Static: two barriers per
//   stage.
// Macros: DTYPE float16|bfloat16; BLOCK 16|32|64|128; COLUMNS a multiple of 128 up to 512, or 256
//   (BLOCK 128); TILE_K 16|32|64; SPARSE_TRANSPOSED, DENSE_TRANSPOSED, OUT_TRANSPOSED 0|1; BOX 0|1:
//   one box has all columns of a consumer (n a multiple of 64, not with DENSE_TRANSPOSED);
//   STAGES 2..; CLUSTER 1, or 2 if BLOCK is 64 or 128; THREADS 384.
// Tensor maps, swizzled by the bytes of their boxes' rows; K is the smaller of TILE_K and BLOCK:
//   values [blocks * BLOCK, BLOCK], boxes of [BLOCK, K], SPARSE_TRANSPOSED [K, up to 64], with
//   CLUSTER 2 of half the rows; d [k, n], boxes of [K, 64], with BOX [columns of a consumer / 64,
//   K, 64] from [n / 64, k, 64], DENSE_TRANSPOSED [columns of a consumer, K] from [n, k]; out,
//   boxes of [64, 64].
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/bsr.py.
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/types.cuh"
#include "gemm/bsr_sm90.cuh"

namespace {

using T = cukit::element_t;

constexpr unsigned kZeroRows = 4096;
constexpr bool kZerosOutside = BLOCK == 16 && !DENSE_TRANSPOSED;

// A stage is divided into parts, each from a single entry.
constexpr int kPartK = TILE_K < BLOCK ? TILE_K : BLOCK;
constexpr int kEntrySteps = BLOCK / kPartK;   // stages of an entry
constexpr int kStageEntries = TILE_K / kPartK;  // entries of a stage

using Shape = cukit::BsrShape<T, BLOCK, COLUMNS, kPartK, SPARSE_TRANSPOSED, (BLOCK < 64 ? BLOCK : 64),
                              !DENSE_TRANSPOSED, 64, kStageEntries>;

static_assert(BLOCK % kPartK == 0 && TILE_K % kPartK == 0, "stages hold entries, or parts of one");
static_assert(CLUSTER == 1 || Shape::kSlots == 1, "a cluster shares one block at a time");

struct Tile {
  int row;     // first row of op(s)
  int column;  // first column of op(d)
  int entry;   // first of the group's entries
  int end_entry;
  int first_step, end_step;

  CUKIT_DEVICE static Tile of(const int4& item) {
    const int rank = CLUSTER > 1 ? cukit::cluster_rank() : 0;
    return {item.x * Shape::kRows, item.y + rank * COLUMNS, item.z, item.w, 0,
            (item.w - item.z) / kStageEntries * kEntrySteps};
  }
};

struct Operands {
  using TileA = Shape::TileA::Tile;
  using TileB = Shape::TileB::Tile;
  const cukit::TensorMap* values;
  const cukit::TensorMap* zeros;
  const cukit::TensorMap* dense;
  const int* block_columns;
  const int* block_indices;
  int columns;  // of op(d)

  // The indices of an entry.
  struct Entry {
    int block_column;
    int block_indices[Shape::kSlots];  // of the blocks, or -1
  };

  CUKIT_DEVICE Entry entry(int index) const {
    Entry entry;
    entry.block_column = block_columns[index];
#pragma unroll
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      entry.block_indices[slot] = block_indices[index * Shape::kSlots + slot];
    }
    return entry;
  }

  // Loads all tiles; called by a warp. Each lane holds the indices of one entry and prefetches
  // those of the entry kWarpSize further on, or of the next tile: an index that is loaded only when
  // it is needed would delay the copies by the latency of a busy L2.
  template <typename Schedule>
  CUKIT_DEVICE void load_tiles(cukit::Pipeline<STAGES>& pipeline, unsigned char* stages,
                               const Schedule& schedule) const {
    const int lane = threadIdx.x % cukit::kWarpSize;
    cukit::PipelineState<STAGES> state;
    Tile tile, next = {}, following = {};
    if (!schedule.tile(0, tile)) return;
    bool has_next = schedule.tile(1, next);
    Entry indices = entry(tile.entry + lane);
    unsigned missing = blockIdx.x;  // counts missing blocks
    for (int turn = 0;; ++turn) {
      const bool has_following = has_next && schedule.tile(turn + 2, following);
      for (int first = tile.entry; first < tile.end_entry; first += cukit::kWarpSize) {
        const bool is_last = first + cukit::kWarpSize >= tile.end_entry;
        const Entry ahead = entry((is_last ? next.entry : first + cukit::kWarpSize) + lane);
        const int count = min(cukit::kWarpSize, tile.end_entry - first);
        for (int i = 0; i < count; i += kStageEntries) {
          for (int step = 0; step < kEntrySteps; ++step) {
            pipeline.acquire(state);
            __syncwarp();  // otherwise a lane could wait for this phase after the next has ended
            unsigned char* const stage = stages + state.index * Shape::kStageBytes;
            cukit::Mbarrier* full = nullptr;
            if (lane == 0) full = pipeline.expect(state, Shape::kStageBytes);
#pragma unroll
            for (int part = 0; part < kStageEntries; ++part) {
              Entry from;
              from.block_column = __shfl_sync(cukit::kFullMask, indices.block_column, i + part);
#pragma unroll
              for (int slot = 0; slot < Shape::kSlots; ++slot) {
                from.block_indices[slot] =
                    __shfl_sync(cukit::kFullMask, indices.block_indices[slot], i + part);
              }
              if (lane == 0) {
                load(stage + part * Shape::kPartBytes, full, tile.column, from, step * kPartK,
                     missing);
              }
            }
            state.advance();
          }
        }
        indices = ahead;
      }
      if (!has_next) return;
      tile = next;
      next = following;
      has_next = has_following;
    }
  }

  // Loads the part of an entry's operands that begins at `within` along k. `part` receives the tile
  // of sparse blocks, then the tiles of d.
  CUKIT_DEVICE void load(unsigned char* part, cukit::Mbarrier* full, int first_column,
                         const Entry& entry, int within, unsigned& missing) const {
    load_dense(part + TileA::kBytes, full, first_column, entry.block_column * BLOCK + within);
#pragma unroll
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      const int block_index = entry.block_indices[slot];
      const bool exists = block_index >= 0;
      const cukit::TensorMap* const from = exists || kZerosOutside ? values : zeros;
      const int row = exists          ? block_index * BLOCK
                      : kZerosOutside ? 1 << 30
                                      : static_cast<int>(missing++ * BLOCK % kZeroRows);
      if constexpr (CLUSTER > 1) {
        constexpr int kShare = TileA::kRows / CLUSTER;
        TileA::template load_multicast<kShare>(part, from, full, SPARSE_TRANSPOSED ? 0 : within,
                                               SPARSE_TRANSPOSED ? row + within : row,
                                               cukit::cluster_rank() * kShare, (1 << CLUSTER) - 1);
      } else if constexpr (SPARSE_TRANSPOSED) {
        constexpr int kParts = TileA::kParts / Shape::kSlots;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          cukit::tma_load_2d(part + (slot * kParts + i) * TileA::kPartBytes, from, full,
                             i * TileA::kPartColumns, row + within);
        }
      } else {
        cukit::tma_load_2d(part + slot * BLOCK * TileA::kRowBytes, from, full, within, row);
      }
    }
  }

  CUKIT_DEVICE void load_dense(unsigned char* tiles, cukit::Mbarrier* full, int first_column,
                               int k) const {
#pragma unroll
    for (int group = 0; group < Shape::kColumnGroups; ++group) {
      unsigned char* const b = tiles + group * TileB::kBytes;
      const int column = first_column + group * Shape::kWidth;
      // Columns beyond the matrix are computed from column 0 but not stored.
      if constexpr (DENSE_TRANSPOSED) {
        TileB::load(b, dense, full, k, column < columns ? column : 0);
      } else if constexpr (BOX) {
        cukit::tma_load_3d(b, dense, full, 0, k, column < columns ? column / 64 : 0);
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
    const __grid_constant__ cukit::TensorMap zeros,   // [kZeroRows, BLOCK] of zeros
    const __grid_constant__ cukit::TensorMap dense,   // d
    const __grid_constant__ cukit::TensorMap out,     // [m, n]; OUT_TRANSPOSED [n, m]
    const int4* __restrict__ work,     // [clusters of the grid, turns]: group, first column, entry
                                       // begin and end
    const int* __restrict__ block_columns,  // [entries + kWarpSize]: of op(s)
    const int* __restrict__ block_indices,  // [entries + kWarpSize, kSlots]: -1 without a block
    const int n, const int turns) {
  const Operands operands{&values, &zeros, &dense, block_columns, block_indices, n};
  cukit::multiply_listed<Shape, Tile, STAGES, CLUSTER>(
      work, turns,
      [&](auto& pipeline, unsigned char* stages, const auto& schedule) {
        operands.load_tiles(pipeline, stages, schedule);
      },
      [&](unsigned char* buffers, int consumer) {
        return Epilogue{buffers, &out, n, consumer};
      });
}
