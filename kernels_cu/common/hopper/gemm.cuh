// The skeleton of matrix products on Hopper (sm_90a): persistent blocks, a producer thread, consumer
// warpgroups. A kernel is put together from four parts, each of which can be replaced alone:
//
//   schedule   which tiles this block computes:   bool tile(int turn, Tile& tile) const
//              A Tile has first_step and end_step, its range of steps along k, and whatever
//              the other parts need to find their data.
//   operands   what a stage holds and how it gets there, one thread:   kStageBytes,
//              void load(unsigned char* stage, Mbarrier* full, const Tile& tile, int step) const
//   product    how a consumer multiplies the stages of a tile into its accumulators:   Accumulators,
//              void multiply(Accumulators&, Pipeline&, State&, const Tile&) const
//   epilogue   what becomes of the accumulators:
//              void store(Accumulators&, const Tile&) const, void finish() const
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
      Mbarrier* const full = pipeline.expect(at, Operands::kStageBytes);
      operands.load(stages + at.index * Operands::kStageBytes, full, tile, step);
      at.advance();
    }
  }
}

// All threads of a consumer warpgroup.
template <int Stages, typename Schedule, typename Product, typename Epilogue>
CUKIT_DEVICE void consume(Pipeline<Stages>& pipeline, const Schedule& schedule,
                          const Product& product, const Epilogue& epilogue) {
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

// The shape of a tile, and the layout of a stage: a | b, both K-major, rows of 128 bytes swizzled.
template <typename T, int TileM, int TileN, int ClusterSize = 1, int Consumers = 2>
struct GemmShape {
  using Element = T;
  static constexpr int kTileM = TileM;
  static constexpr int kTileN = TileN;
  static constexpr int kTileK = 128 / static_cast<int>(sizeof(T));
  static constexpr int kCluster = ClusterSize;
  static constexpr int kConsumers = Consumers;
  static constexpr int kGroupRows = TileM / Consumers;          // of a consumer
  static constexpr int kRowTiles = kGroupRows / kWarpgroupRows;  // its products in each step of k
  using TileA = SharedTile<T, TileM, kTileK>;
  using TileB = SharedTile<T, TileN, kTileK>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;

  static_assert(kGroupRows % kWarpgroupRows == 0, "whole products of a warpgroup");
  static_assert(kRowTiles * TileN <= 256, "accumulators fit into registers");

  // First row and column of this block's tile of the result.
  CUKIT_DEVICE static int row(const MatrixTile& tile) {
    const int rank = ClusterSize > 1 ? cluster_rank() : 0;
    return (tile.m * ClusterSize + rank) * TileM;
  }
  CUKIT_DEVICE static int column(const MatrixTile& tile) { return tile.n * TileN; }
};

// a [rows, k] and b [columns, k] through tensor maps with boxes of [TileM, kTileK] and
// [TileN / ClusterSize, kTileK], which read zeros outside their tensors. The blocks of a cluster load a
// share of their common tile of b each, for all.
template <typename Shape>
struct DenseOperands {
  static constexpr int kStageBytes = Shape::kStageBytes;
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

// Both operands from shared memory. One step's products stay in flight while the next stage is waited
// for; the stage before is then released.
template <typename Shape>
struct SharedProduct {
  using Accumulators = float[Shape::kRowTiles][Shape::kTileN / 2];
  unsigned long long a, b;  // descriptors of this consumer's operands in stage 0

  CUKIT_DEVICE SharedProduct(const unsigned char* stages, int group)
      : a(Shape::TileA::k_major(stages) + group * Shape::TileA::rows(Shape::kGroupRows)),
        b(Shape::TileB::k_major(stages + Shape::TileA::kBytes)) {}

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
          wgmma<typename Shape::Element, Shape::kTileN>(
              sums[row], a + stage + TileA::rows(row * kWarpgroupRows) + TileA::k_step(k),
              b + stage + TileB::k_step(k), step > 0 || k > 0);
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

// Leaves accumulators as they are.
struct Identity {
  template <int N>
  CUKIT_DEVICE void operator()(float (&)[N], int, int) const {}
};

// Rounds to T and stores through swizzled shared memory and TMA (common/hopper/store.cuh).
// `transform(sums, row, column)` changes the accumulators of 64 rows before: bias, activation, scales;
// row and column are those of the result where the 64 rows begin.
template <typename Shape, typename T, typename Transform = Identity>
struct StagedEpilogue {
  using Store = StagedStore<T, Shape::kTileN, 64, Shape::kTileN % 128 == 0 ? 2 : 1>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* out;    // boxes of [64, 64], swizzled
  int rows, columns;       // of the result
  int group;               // this consumer
  Transform transform;

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) const {
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
      const int column = Shape::column(tile);
      transform(sums[row_tile], row, column);
      Store::store(sums[row_tile], buffers + group * Store::kBytes, out, column, row, columns, rows,
                   1 + group);
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace cukit
