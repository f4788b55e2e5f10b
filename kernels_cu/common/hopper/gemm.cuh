// The skeleton of a matrix product on Hopper (sm_90a): persistent blocks with a producer thread and
// consumer warpgroups. A kernel is composed of four independently replaceable parts:
//
//   schedule   the tiles of this block:   bool tile(int turn, Tile& tile) const
//              A Tile has first_step and end_step, its range of steps along k, and the
//              coordinates that the other parts need.
//   operands   loads a stage, called by one thread:   kStageBytes,
//              int bytes(const Tile& tile) const, optional: the bytes of a tile's loads,
//              void load(unsigned char* stage, Mbarrier* full, const Tile& tile, int step) const
//   product    the consumer's main loop over the stages of a tile:   Accumulators,
//              void multiply(Accumulators&, Pipeline&, State&, const Tile&) const
//   epilogue   stores the accumulators:   void begin(const Tile&), optional: issues loads that
//              overlap the products;   void store(Accumulators&, const Tile&),
//              void finish()
//
//   producer::            operands.load() -> stage -> product.multiply() -> epilogue.store()
//   one thread            TMA                wgmma, 1 or 2 warpgroups       stmatrix, TMA
//
// The pipeline continues across tiles: while the consumers store one result, the producer loads the
// next tile's operands.
//
// Below the skeleton are the parts of the plain dense product: DenseTiles, DenseOperands,
// SharedProduct; its epilogues are in common/hopper/gemm_epilogue.cuh.
#pragma once

#include "common/hopper/gemm_epilogue.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile_scheduler.cuh"

namespace cukit {

// ---- The skeleton ----

namespace detail {

// operands.bytes(tile) if it exists, else kStageBytes.
template <typename Operands, typename Tile>
CUKIT_DEVICE auto stage_bytes(const Operands& operands, const Tile& tile, int)
    -> decltype(operands.bytes(tile)) {
  return operands.bytes(tile);
}
template <typename Operands, typename Tile>
CUKIT_DEVICE int stage_bytes(const Operands&, const Tile&, long) {
  return Operands::kStageBytes;
}

// Calls epilogue.begin(tile) if it exists.
template <typename Epilogue, typename Tile>
CUKIT_DEVICE auto begin_tile(Epilogue& epilogue, const Tile& tile, int)
    -> decltype(epilogue.begin(tile)) {
  epilogue.begin(tile);
}
template <typename Epilogue, typename Tile>
CUKIT_DEVICE void begin_tile(Epilogue&, const Tile&, long) {}

}  // namespace detail

// One thread of the producer warpgroup. `stages`: Stages * Operands::kStageBytes of shared memory.
template <int Stages, typename Schedule, typename Operands>
CUKIT_DEVICE void produce(Pipeline<Stages>& pipeline, unsigned char* stages,
                          const Schedule& schedule, const Operands& operands) {
  PipelineState<Stages> state;
  typename Schedule::Tile tile;
  for (int turn = 0; schedule.tile(turn, tile); ++turn) {
    const int bytes = detail::stage_bytes(operands, tile, 0);
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.acquire(state);
      Mbarrier* const full = pipeline.expect(state, bytes);
      operands.load(stages + state.index * Operands::kStageBytes, full, tile, step);
      state.advance();
    }
  }
}

// All threads of a consumer warpgroup.
template <int Stages, typename Schedule, typename Product, typename Epilogue>
CUKIT_DEVICE void consume(Pipeline<Stages>& pipeline, const Schedule& schedule,
                          const Product& product, Epilogue& epilogue) {
  PipelineState<Stages> state;
  typename Schedule::Tile tile;
  typename Product::Accumulators sums;
  for (int turn = 0; schedule.tile(turn, tile); ++turn) {
    detail::begin_tile(epilogue, tile, 0);
    product.multiply(sums, pipeline, state, tile);
    epilogue.store(sums, tile);
  }
  epilogue.finish();
}

// As consume(), with an epilogue in steps that overlap the products of the next tile: the tensor
// cores stay busy during the epilogue, at the cost of accumulators for two tiles. The epilogue
// provides
//   store_step(const Accumulators&, const Tile&, int step)
// and product.multiply<kSteps>() calls its last argument with 0 .. kSteps - 1 while the wgmmas of
// these k steps run. Every tile must have at least kSteps = Epilogue::kSteps k steps.
template <int Stages, typename Schedule, typename Product, typename Epilogue>
CUKIT_DEVICE void consume_overlapped(Pipeline<Stages>& pipeline, const Schedule& schedule,
                                     const Product& product, Epilogue& epilogue) {
  using Sums = typename Product::Accumulators;
  constexpr int kSteps = Epilogue::kSteps;
  PipelineState<Stages> state;
  typename Schedule::Tile tile, before;
  Sums even, odd;
  int turn = 0;
  // Multiplies the next tile while storing the previous one; false if there is no next tile.
  const auto next = [&](Sums& sums, const Sums& stored) {
    before = tile;
    const bool exists = schedule.tile(++turn, tile);
    if (exists) {
      product.template multiply<kSteps>(
          sums, pipeline, state, tile,
          [&](int step) { epilogue.store_step(stored, before, step); });
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) epilogue.store_step(stored, before, step);
    }
    return exists;
  };
  if (schedule.tile(0, tile)) {
    product.multiply(even, pipeline, state, tile);
    while (next(odd, even) && next(even, odd)) {
    }
  }
  epilogue.finish();
}

// As consume(), with two consumer warpgroups that alternate: `consumer` 0 computes the whole tiles
// of turns 0, 2, ..., consumer 1 those of turns 1, 3, ...; one runs its epilogue while the other
// multiplies. The main loops run in the order of the turns, so the stages are read in the order in
// which they were filled, each by one warpgroup: `pipeline` expects kWarpgroupWarps consumer
// arrivals.
//
// `issued` is the event that a turn's wgmmas have been issued, initialised with kWarpgroupWarps
// arrivals: the next turn's wgmmas are issued while those of the last step still run. Epilogues are
// not ordered; both run at the same time if an epilogue takes longer than a main loop. The epilogue
// must synchronise its warpgroup (as all that store by TMA do), so that no warp is a turn ahead.
//
// product.multiply<0>() calls its last argument once a tile's wgmmas have been issued.
template <int Stages, typename Schedule, typename Product, typename Epilogue>
CUKIT_DEVICE void consume_alternating(Pipeline<Stages>& pipeline, StageBarriers<1>& issued,
                                      int consumer, const Schedule& schedule,
                                      const Product& product, Epilogue& epilogue) {
  PipelineState<Stages> state;
  PipelineState<1> order;
  typename Schedule::Tile tile;
  for (int turn = 0; schedule.tile(turn, tile); ++turn) {
    if (turn % 2 == consumer) {
      typename Product::Accumulators sums;
      detail::begin_tile(epilogue, tile, 0);
      issued.wait_previous(order);
      product.template multiply<0>(
          sums, pipeline, state, tile, [](int) {}, [&] { issued.arrive_warp(order); });
      epilogue.store(sums, tile);
    } else {
      state.advance(tile.end_step - tile.first_step);
    }
    order.advance();
  }
  epilogue.finish();
}

// Call before a block exits: waits until no block of the cluster accesses another's shared memory.
template <int ClusterSize>
CUKIT_DEVICE void leave_cluster() {
  if constexpr (ClusterSize > 1) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// ---- Schedule ----

// The tiles of one matrix under the static schedule. Tile::m and Tile::n are tile indices; with
// clusters, m is the index of a cluster of vertically adjacent tiles.
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

// An operand's layout in memory: contiguous along k (K-major: [m, k], [n, k]), or along m or n
// (MN-major: [k, m], [k, n]; 16-bit elements only).
enum class Major { K, MN };

// An operand's tile in a stage: Extent rows (of a) or columns (of b) times TileK elements along k.
//
// load() loads `count` rows (columns) from `first` on, K-major in boxes of `box` rows, which
// divides Extent unless one box suffices; bytes() returns the number of bytes that load() loads.
// Rows outside the tensor are skipped, because TMA takes several times longer for them than for
// rows inside. The rest of the tile keeps its previous contents, which only affect results that are
// not stored; clear_rest() initialises the rest before the first load.
template <typename T, int Extent, int TileK, Major kMajor>
struct OperandTile;

template <typename T, int Extent, int TileK>
struct OperandTile<T, Extent, TileK, Major::K> : SharedTile<T, Extent, TileK> {
  using Tile = SharedTile<T, Extent, TileK>;
  static constexpr bool kTransposed = false;
  static constexpr int kSteps = Tile::kSteps;
  static_assert(Tile::kParts == 1, "a step of k is one swizzle row");

  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first, int count = Extent, int box = Extent) {
    if (count <= box) {
      tma_load_2d(tile, map, full, k, first);
      return;
    }
    for (int at = 0; at < count; at += box) {
      tma_load_2d(tile + at * Tile::kRowBytes, map, full, k, first + at);
    }
  }
  CUKIT_DEVICE static int bytes(int count, int box) {
    // Avoids a division, which would delay the first load.
    const int boxes = count <= box ? 1 : (count + box - 1) / box;
    return boxes * box * Tile::kRowBytes;
  }
  // For one of several matrices in a map. `origin`: the matrix's first row; `extent`: its number of
  // rows (columns).
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first, const MatrixRow& origin, int extent) {
    Tile::load(tile, map, full, k, origin.below(first), k + TileK);
  }
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile) {
    return Tile::k_major(tile);
  }
  // Descriptor offsets of row (column) `count`, and of k step `index`.
  static constexpr int along(int count) { return Tile::rows(count); }
  static constexpr int step(int index) { return Tile::k_step(index); }
};

template <typename T, int Extent, int TileK>
struct OperandTile<T, Extent, TileK, Major::MN> : SharedTile<T, TileK, Extent> {
  using Tile = SharedTile<T, TileK, Extent>;
  static constexpr bool kTransposed = true;
  static constexpr int kSteps = Tile::kRowSteps;

  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int k,
                                int first, int count = Extent, int = Extent) {
    for (int part = 0; part * Tile::kPartColumns < count; ++part) {
      tma_load_2d(tile + part * Tile::kPartBytes, map, full, first + part * Tile::kPartColumns, k);
    }
  }
  CUKIT_DEVICE static int bytes(int count, int) {
    return (count + Tile::kPartColumns - 1) / Tile::kPartColumns * Tile::kPartBytes;
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

// Zeroes bytes `begin` .. `end` - 1 of Stages tiles, one per stage. Called by all threads of the
// block; visible to wgmma after fence_proxy_async and a barrier.
template <int Stages>
CUKIT_DEVICE void clear_bytes(unsigned char* tile, int stage_bytes, int begin, int end) {
  for (int stage = 0; stage < Stages; ++stage) {
    for (int at = begin + 16 * threadIdx.x; at < end; at += 16 * blockDim.x) {
      *reinterpret_cast<uint4*>(tile + stage * stage_bytes + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

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
  static constexpr int kConsumerRows = TileM / Consumers;
  static constexpr int kRowTiles = kConsumerRows / kWarpgroupRows;  // of wgmma, per consumer
  using TileA = OperandTile<T, TileM, kTileK, MajorA>;
  using TileB = OperandTile<T, TileN, kTileK, MajorB>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;

  static_assert(kConsumerRows % kWarpgroupRows == 0, "full wgmmas per warpgroup");
  static_assert(kRowTiles * TileN <= 256, "accumulators fit into registers");
  static_assert(ClusterSize == 1 || MajorB == Major::K, "blocks share rows of a K-major b");

  // First row and column of this block's tile of the result.
  CUKIT_DEVICE static int row(const MatrixTile& tile) {
    const int rank = ClusterSize > 1 ? cluster_rank() : 0;
    return (tile.m * ClusterSize + rank) * TileM;
  }
  CUKIT_DEVICE static int column(const MatrixTile& tile) { return tile.n * TileN; }
};

// a and b from tensor maps that read zeros outside their tensors. Boxes of a K-major operand:
// [box_a, kTileK] and [box_b, kTileK] (with clusters [kTileN / kCluster, kTileK]); of an MN-major
// operand: [kTileK, 128 bytes]. Each block of a cluster multicasts its share of their common tile
// of b to all blocks. StageBytes: size of a stage; additional data follow the operands.
template <typename Shape, int StageBytes = Shape::kStageBytes>
struct DenseOperands {
  static constexpr int kStageBytes = StageBytes;
  const TensorMap* a;
  const TensorMap* b;
  int rows;
  int columns = 1 << 30;
  int box_a = Shape::kTileM;
  int box_b = Shape::kTileN;

  using TileA = typename Shape::TileA;
  using TileB = typename Shape::TileB;

  // A block of the last cluster may have no rows: it loads rows from 0 on and stores nothing.
  CUKIT_DEVICE int row(const MatrixTile& tile) const {
    return Shape::row(tile) < rows ? Shape::row(tile) : 0;
  }
  CUKIT_DEVICE int tile_rows(const MatrixTile& tile) const {
    return min(Shape::kTileM, rows - row(tile));
  }
  CUKIT_DEVICE int tile_columns(const MatrixTile& tile) const {
    return min(Shape::kTileN, columns - Shape::column(tile));
  }

  CUKIT_DEVICE int bytes(const MatrixTile& tile) const {
    const int bytes_b = Shape::kCluster > 1 ? TileB::kBytes : TileB::bytes(tile_columns(tile), box_b);
    return TileA::bytes(tile_rows(tile), box_a) + bytes_b;
  }

  // Zeroes the bytes that load() skips in the last tiles. Called by all threads before any load.
  template <int Stages>
  CUKIT_DEVICE void clear_rest(unsigned char* stages) const {
    if (rows % Shape::kTileM == 0 && columns % Shape::kTileN == 0) return;
    const int min_bytes_a = TileA::bytes((rows - 1) % Shape::kTileM + 1, box_a);
    const int min_bytes_b = TileB::bytes((columns - 1) % Shape::kTileN + 1, box_b);
    clear_bytes<Stages>(stages, kStageBytes, min_bytes_a, TileA::kBytes);
    clear_bytes<Stages>(stages + TileA::kBytes, kStageBytes, min_bytes_b, TileB::kBytes);
    fence_proxy_async();
  }

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const MatrixTile& tile,
                         int step) const {
    constexpr int kCluster = Shape::kCluster;
    const int column = Shape::column(tile);
    const int k = step * Shape::kTileK;
    TileA::load(stage, a, full, k, row(tile), tile_rows(tile), box_a);
    if constexpr (kCluster > 1) {
      constexpr int kShare = Shape::kTileN / kCluster;
      TileB::template load_multicast<kShare>(stage + TileA::kBytes, b, full, k, column,
                                             cluster_rank() * kShare, (1 << kCluster) - 1);
    } else {
      TileB::load(stage + TileA::kBytes, b, full, k, column, tile_columns(tile), box_b);
    }
  }
};

// Two matrices b, concatenated in each tile: columns of `gate` in the tile's first half, the same
// columns of `up` in the second. Both are K-major [columns of the result, k], with boxes of [box_b,
// kTileK].
template <typename Shape>
struct PairedOperands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  static constexpr int kColumns = Shape::kTileN / 2;  // of the result
  using TileA = typename Shape::TileA;
  using Half = OperandTile<typename Shape::Element, kColumns, Shape::kTileK, Major::K>;
  const TensorMap* a;
  const TensorMap* gate;
  const TensorMap* up;
  int rows, columns;  // of the result
  int box_a, box_b;

  CUKIT_DEVICE int tile_rows(const MatrixTile& tile) const {
    return min(Shape::kTileM, rows - Shape::row(tile));
  }
  CUKIT_DEVICE int tile_columns(const MatrixTile& tile) const {
    return min(kColumns, columns - tile.n * kColumns);
  }

  CUKIT_DEVICE int bytes(const MatrixTile& tile) const {
    return TileA::bytes(tile_rows(tile), box_a) + 2 * Half::bytes(tile_columns(tile), box_b);
  }

  // As in DenseOperands.
  template <int Stages>
  CUKIT_DEVICE void clear_rest(unsigned char* stages) const {
    if (rows % Shape::kTileM == 0 && columns % kColumns == 0) return;
    const int min_bytes_a = TileA::bytes((rows - 1) % Shape::kTileM + 1, box_a);
    const int min_bytes_b = Half::bytes((columns - 1) % kColumns + 1, box_b);
    clear_bytes<Stages>(stages, kStageBytes, min_bytes_a, TileA::kBytes);
    for (int half = 0; half < 2; ++half) {
      clear_bytes<Stages>(stages + TileA::kBytes + half * Half::kBytes, kStageBytes, min_bytes_b,
                          Half::kBytes);
    }
    fence_proxy_async();
  }

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const MatrixTile& tile,
                         int step) const {
    const int k = step * Shape::kTileK;
    const int column = tile.n * kColumns;
    unsigned char* const b = stage + TileA::kBytes;
    TileA::load(stage, a, full, k, Shape::row(tile), tile_rows(tile), box_a);
    Half::load(b, gate, full, k, column, tile_columns(tile), box_b);
    Half::load(b + Half::kBytes, up, full, k, column, tile_columns(tile), box_b);
  }
};

// Both operands from shared memory. A step's wgmmas stay in flight while the consumer waits for the
// next stage and issues the next step's wgmmas; once they are complete, their stage is released.
template <typename Shape>
struct SharedProduct {
  using Sum = typename AccumulatorOf<typename Shape::Element>::Type;
  using Accumulators = Sum[Shape::kRowTiles][Shape::kTileN / 2];
  unsigned long long a, b;  // descriptors of this consumer's operands in stage 0

  CUKIT_DEVICE SharedProduct(const unsigned char* stages, int consumer)
      : a(Shape::TileA::descriptor(stages) + consumer * Shape::TileA::along(Shape::kConsumerRows)),
        b(Shape::TileB::descriptor(stages + Shape::TileA::kBytes)) {}

  template <int Stages, typename Tile>
  CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& state, const Tile& tile) const {
    multiply<0>(sums, pipeline, state, tile, [](int) {});
  }

  // Calls overlapped(step) after issuing each of the first `Overlapped` k steps, while the step's
  // wgmmas run. The tile must have at least `Overlapped` steps.
  template <int Overlapped, int Stages, typename Tile, typename Call>
  CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& state, const Tile& tile,
                             const Call& overlapped) const {
    multiply<Overlapped>(sums, pipeline, state, tile, overlapped, [] {});
  }

  // Also calls issued() once the wgmmas of all steps have been issued; those of the last step still
  // run.
  template <int Overlapped, int Stages, typename Tile, typename Call, typename Issued>
  CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& state, const Tile& tile,
                             const Call& overlapped, const Issued& issued) const {
    const int steps = tile.end_step - tile.first_step;
    PipelineState<Stages> done;
#pragma unroll
    for (int step = 0; step < Overlapped; ++step) {
      multiply_step(sums, pipeline, state, done, step > 0);
      overlapped(step);
    }
    for (int step = Overlapped; step < steps; ++step) {
      multiply_step(sums, pipeline, state, done, step > 0);
    }
    issued();
#pragma unroll
    for (int row = 0; row < Shape::kRowTiles; ++row) wgmma_wait<0>(sums[row]);
    pipeline.template release_to_cluster<Shape::kCluster>(done);
  }

 private:
  // Issues a step's wgmmas and waits for those of the previous step, whose stage is `done`.
  template <int Stages>
  CUKIT_DEVICE void multiply_step(Accumulators& sums, Pipeline<Stages>& pipeline,
                                  PipelineState<Stages>& state, PipelineState<Stages>& done,
                                  bool accumulates) const {
    using TileA = typename Shape::TileA;
    using TileB = typename Shape::TileB;
    const unsigned long long stage = state.index * (Shape::kStageBytes / 16);
    pipeline.wait(state);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TileA::kSteps; ++k)
#pragma unroll
      for (int row = 0; row < Shape::kRowTiles; ++row) {
        wgmma<typename Shape::Element, Shape::kTileN, TileA::kTransposed, TileB::kTransposed>(
            sums[row], a + stage + TileA::along(row * kWarpgroupRows) + TileA::step(k),
            b + stage + TileB::step(k), accumulates || k > 0);
      }
    wgmma_commit();
#pragma unroll
    for (int row = 0; row < Shape::kRowTiles; ++row) wgmma_wait<1>(sums[row]);
    if (accumulates) pipeline.template release_to_cluster<Shape::kCluster>(done);
    done = state;
    state.advance();
  }
};

}  // namespace cukit
