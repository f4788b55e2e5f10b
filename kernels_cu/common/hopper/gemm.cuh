// The skeleton of matrix products on Hopper (sm_90a): persistent blocks, a producer thread, consumer
// warpgroups. A kernel is put together from four parts, each of which can be replaced alone:
//
//   schedule   which tiles this block computes:   bool tile(int turn, Tile& tile) const
//              A Tile has first_step and end_step, its range of steps along k, and whatever
//              the other parts need to find their data.
//   operands   what a stage holds and how it gets there, one thread:   kStageBytes; kLoadedBytes,
//              which copies bring (kStageBytes may have padding);
//              void load(unsigned char* stage, Mbarrier* full, const Tile& tile, int step) const
//   product    how a consumer multiplies the stages of a tile into its accumulators:   Accumulators,
//              void multiply(Accumulators&, Pipeline&, State&, const Tile&) const
//   epilogue   what becomes of the accumulators:   void store(Accumulators&, const Tile&),
//              void finish()
//
//   producer::            operands.load() -> stage -> product.multiply() -> epilogue.store()
//   one thread            TMA                wgmma, 1 or 2 warpgroups       stmatrix, TMA
//
// The pipeline runs on across tiles: while the consumers store one result, the producer already loads
// the next tile's operands.
//
// Below the skeleton are the parts of the plain dense product: DenseTiles, DenseOperands,
// SharedProduct, StagedEpilogue.
#pragma once

#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/tile_scheduler.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace cukit {

// ---- The skeleton ----

// One thread of the producer warpgroup. `stages`: Stages * Operands::kStageBytes of shared memory.
template <int Stages, typename Schedule, typename Operands>
CUKIT_DEVICE void produce(Pipeline<Stages>& pipeline, unsigned char* stages,
                          const Schedule& schedule, const Operands& operands) {
  PipelineState<Stages> at;
  typename Schedule::Tile tile;
  for (int turn = 0; schedule.tile(turn, tile); ++turn) {
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.acquire(at);
      Mbarrier* const full = pipeline.expect(at, Operands::kLoadedBytes);
      operands.load(stages + at.index * Operands::kStageBytes, full, tile, step);
      at.advance();
    }
  }
}

// All threads of a consumer warpgroup.
template <int Stages, typename Schedule, typename Product, typename Epilogue>
CUKIT_DEVICE void consume(Pipeline<Stages>& pipeline, const Schedule& schedule,
                          const Product& product, Epilogue& epilogue) {
  PipelineState<Stages> at;
  typename Schedule::Tile tile;
  typename Product::Accumulators sums;
  for (int turn = 0; schedule.tile(turn, tile); ++turn) {
    product.multiply(sums, pipeline, at, tile);
    epilogue.store(sums, tile);
  }
  epilogue.finish();
}

// The shared memory of a block belongs to its cluster until every block has come here.
template <int ClusterSize>
CUKIT_DEVICE void leave_cluster() {
  if constexpr (ClusterSize > 1) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// ---- Schedule ----

// The tiles of one matrix under the static schedule. A tile's m and n count tiles; with clusters, m
// counts clusters of tiles that lie one below the other.
template <int ClusterSize = 1>
struct DenseTiles {
  using Tile = MatrixTile;
  MatrixTiles tiles;

  CUKIT_DEVICE bool tile(int turn, Tile& tile) const {
    const int index = static_tile<ClusterSize>(turn);
    if (index >= tiles.count()) return false;
    tile = tiles.at(index);
    return true;
  }
};

// ---- Operands and product ----

// How an operand lies in memory: rows along k (K-major: [m, k], [n, k]), or along m or n (MN-major:
// [k, m], [k, n]; 16-bit elements only).
enum class Major { K, MN };

// An operand's share of a stage: Extent rows (of a) or columns (of b) times TileK steps of k.
template <typename T, int Extent, int TileK, Major kMajor>
struct OperandTile;

template <typename T, int Extent, int TileK>
struct OperandTile<T, Extent, TileK, Major::K> : SharedTile<T, Extent, TileK> {
  using Tile = SharedTile<T, Extent, TileK>;
  static constexpr bool kTransposed = false;
  static constexpr int kSteps = Tile::kSteps;

  // `first`: of the operand's rows (a) or columns (b).
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first) {
    Tile::load(tile, map, full, k, first);
  }
  // Of one of several matrices, which begins at row `origin` of the map; `extent`: of the operand's rows
  // (columns).
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first, const MatrixRow& origin, int extent) {
    Tile::load(tile, map, full, k, origin.below(first), k + TileK);
  }
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile) {
    return Tile::k_major(tile);
  }
  // What is added to the descriptor for rows (columns) further on, and for steps of k.
  static constexpr int along(int count) { return Tile::rows(count); }
  static constexpr int step(int index) { return Tile::k_step(index); }
};

template <typename T, int Extent, int TileK>
struct OperandTile<T, Extent, TileK, Major::MN> : SharedTile<T, TileK, Extent> {
  using Tile = SharedTile<T, TileK, Extent>;
  static constexpr bool kTransposed = true;
  static constexpr int kSteps = Tile::kRowSteps;

  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first) {
    Tile::load(tile, map, full, first, k);
  }
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first, const MatrixRow& origin, int extent) {
    Tile::load(tile, map, full, first, origin.below(k), extent);
  }
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile) {
    return Tile::mn_major(tile);
  }
  // `count`: a multiple of a part's columns.
  static constexpr int along(int count) { return count / Tile::kPartColumns * Tile::kPart; }
  static constexpr int step(int index) { return Tile::mn_step(index); }
};

// The shape of a tile, and the layout of a stage: a | b, in rows of 128 bytes, swizzled.
template <typename T, int TileM, int TileN, int ClusterSize = 1, int Consumers = 2,
          Major MajorA = Major::K, Major MajorB = Major::K>
struct GemmShape {
  using Element = T;
  static constexpr int kTileM = TileM;
  static constexpr int kTileN = TileN;
  static constexpr int kTileK = 128 / static_cast<int>(sizeof(T));
  static constexpr int kCluster = ClusterSize;
  static constexpr int kConsumers = Consumers;
  static constexpr int kGroupRows = TileM / Consumers;          // of a consumer
  static constexpr int kRowTiles = kGroupRows / kWarpgroupRows;  // its products in each step of k
  using TileA = OperandTile<T, TileM, kTileK, MajorA>;
  using TileB = OperandTile<T, TileN, kTileK, MajorB>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;

  static_assert(kGroupRows % kWarpgroupRows == 0, "whole products of a warpgroup");
  static_assert(kRowTiles * TileN <= 256, "accumulators fit into registers");
  static_assert(ClusterSize == 1 || MajorB == Major::K, "blocks share rows of a K-major b");

  // First row and column of this block's tile of the result.
  CUKIT_DEVICE static int row(const MatrixTile& tile) {
    const int rank = ClusterSize > 1 ? cluster_rank() : 0;
    return (tile.m * ClusterSize + rank) * TileM;
  }
  CUKIT_DEVICE static int column(const MatrixTile& tile) { return tile.n * TileN; }
};

// a and b through tensor maps which read zeros outside their tensors. Boxes of a K-major operand:
// [TileM, kTileK] and [TileN / ClusterSize, kTileK]; of an MN-major one: [kTileK, 128 bytes]. The
// blocks of a cluster load a share of their common tile of b each, for all.
template <typename Shape>
struct DenseOperands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  static constexpr int kLoadedBytes = kStageBytes;
  const TensorMap* a;
  const TensorMap* b;
  int rows;

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const MatrixTile& tile,
                         int step) const {
    using TileA = typename Shape::TileA;
    using TileB = typename Shape::TileB;
    constexpr int kCluster = Shape::kCluster;
    // The second block of a cluster may have no rows left; what it multiplies is not stored.
    const int row = Shape::row(tile) < rows ? Shape::row(tile) : 0;
    const int column = Shape::column(tile);
    TileA::load(stage, a, full, step * Shape::kTileK, row);
    if constexpr (kCluster > 1) {
      constexpr int kShare = Shape::kTileN / kCluster;
      TileB::template load_multicast<kShare>(stage + TileA::kBytes, b, full, step * Shape::kTileK,
                                             column, cluster_rank() * kShare, (1 << kCluster) - 1);
    } else {
      TileB::load(stage + TileA::kBytes, b, full, step * Shape::kTileK, column);
    }
  }
};

// Two matrices b side by side in each tile: columns of `gate` in its first half, the same columns of
// `up` in its second. Both K-major [TileN / 2 columns of the result, k], boxes of [TileN / 2, kTileK].
template <typename Shape>
struct PairedOperands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  static constexpr int kLoadedBytes = kStageBytes;
  static constexpr int kColumns = Shape::kTileN / 2;  // of the result
  using Half = OperandTile<typename Shape::Element, kColumns, Shape::kTileK, Major::K>;
  const TensorMap* a;
  const TensorMap* gate;
  const TensorMap* up;

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const MatrixTile& tile,
                         int step) const {
    using TileA = typename Shape::TileA;
    const int k = step * Shape::kTileK;
    TileA::load(stage, a, full, k, Shape::row(tile));
    Half::load(stage + TileA::kBytes, gate, full, k, tile.n * kColumns);
    Half::load(stage + TileA::kBytes + Half::kBytes, up, full, k, tile.n * kColumns);
  }
};

// Both operands from shared memory. One step's products stay in flight while the next stage is waited
// for; the stage before is then released.
template <typename Shape>
struct SharedProduct {
  using Sum = typename AccumulatorOf<typename Shape::Element>::Type;
  using Accumulators = Sum[Shape::kRowTiles][Shape::kTileN / 2];
  unsigned long long a, b;  // descriptors of this consumer's operands in stage 0

  CUKIT_DEVICE SharedProduct(const unsigned char* stages, int group)
      : a(Shape::TileA::descriptor(stages) + group * Shape::TileA::along(Shape::kGroupRows)),
        b(Shape::TileB::descriptor(stages + Shape::TileA::kBytes)) {}

  template <int Stages, typename Tile>
  CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& at, const Tile& tile) const {
    using TileA = typename Shape::TileA;
    using TileB = typename Shape::TileB;
    const int steps = tile.end_step - tile.first_step;
    PipelineState<Stages> done;
    for (int step = 0; step < steps; ++step) {
      const unsigned long long stage = at.index * (Shape::kStageBytes / 16);
      pipeline.wait(at);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TileA::kSteps; ++k)
#pragma unroll
        for (int row = 0; row < Shape::kRowTiles; ++row) {
          wgmma<typename Shape::Element, Shape::kTileN, TileA::kTransposed, TileB::kTransposed>(
              sums[row], a + stage + TileA::along(row * kWarpgroupRows) + TileA::step(k),
              b + stage + TileB::step(k), step > 0 || k > 0);
        }
      wgmma_commit();
#pragma unroll
      for (int row = 0; row < Shape::kRowTiles; ++row) wgmma_wait<1>(sums[row]);
      if (step > 0) pipeline.template release_to_cluster<Shape::kCluster>(done);
      done = at;
      at.advance();
    }
#pragma unroll
    for (int row = 0; row < Shape::kRowTiles; ++row) wgmma_wait<0>(sums[row]);
    pipeline.template release_to_cluster<Shape::kCluster>(done);
  }
};

// ---- Epilogue ----

// What becomes of 64 rows of accumulators before they are rounded. (row, column): where they begin in
// the product.
//   kParts      columns of the product for one of the result: 2 where halves of a tile are combined
//   kKeeps      whether the result of prepare() is stored too
//   prepare()   bias, scales
//   operator()  activation; with kParts 2 the results are left in the first half
// Leaves accumulators as they are:
struct Identity {
  static constexpr int kParts = 1;
  static constexpr bool kKeeps = false;
  template <int N>
  CUKIT_DEVICE void prepare(float (&)[N], int, int) const {}
  template <int N>
  CUKIT_DEVICE void operator()(float (&)[N], int, int) const {}
};

// Rounds to T and stores through swizzled shared memory and TMA (common/hopper/store.cuh).
template <typename Shape, typename T, typename Transform = Identity>
struct StagedEpilogue {
  static constexpr int kColumns = Shape::kTileN / Transform::kParts;  // of the result
  static constexpr int kPieceColumns = kColumns % 64 == 0 ? 64 : kColumns % 32 == 0 ? 32 : 16;
  using Store =
      StagedStore<T, kColumns, kPieceColumns, (kColumns > kPieceColumns ? 2 : 1)>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* out;    // boxes of [64, kPieceColumns], swizzled
  int rows, columns;       // of the result
  int group;               // this consumer
  Transform transform;
  const TensorMap* kept = nullptr;  // [rows, kParts * columns], in boxes of the same shape

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) const {
    unsigned char* const buffer = buffers + group * Store::kBytes;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
      const int column = tile.n * kColumns;
      transform.prepare(sums[row_tile], row, column);
      if constexpr (Transform::kKeeps) {
        Store::template store<0>(sums[row_tile], buffer, kept, column, row, columns, rows, 1 + group);
        if constexpr (Transform::kParts == 2) {
          Store::template store<kColumns / 2>(sums[row_tile], buffer, kept, columns + column, row,
                                              2 * columns, rows, 1 + group);
        }
      }
      transform(sums[row_tile], row, column);
      Store::template store<0>(sums[row_tile], buffer, out, column, row, columns, rows, 1 + group);
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

// The same for a product whose transpose is the result: rows of a are its columns.
template <typename Shape, typename T, typename Transform = Identity>
struct TransposedEpilogue {
  using Store = TransposedStore<T, Shape::kTileN>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* out;    // boxes of [kTileN, 64], swizzled
  int rows, columns;       // of the product
  int group;               // this consumer
  Transform transform;
  const TensorMap* kept = nullptr;

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) const {
    unsigned char* const buffer = buffers + group * Store::kBytes;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
      const int column = Shape::column(tile);
      transform.prepare(sums[row_tile], row, column);
      if constexpr (Transform::kKeeps) {
        Store::store(sums[row_tile], buffer, kept, row, column, rows, columns, 1 + group);
      }
      transform(sums[row_tile], row, column);
      Store::store(sums[row_tile], buffer, out, row, column, rows, columns, 1 + group);
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace cukit
