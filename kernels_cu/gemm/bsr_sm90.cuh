// Shared by the block-sparse products on Hopper: the shape of a tile, its product, its schedule and
// the block skeleton (sm_90a; built from common/hopper/gemm.cuh). Macro: THREADS.
//
// A tile has the rows of one block row and is as wide as the accumulators allow, so that each
// stored block is read as few times as possible:
//   blocks of 128  each consumer has 64 of the rows and all columns;
//   blocks of 64   both consumers have the same 64 rows, and half of the columns each;
//   smaller blocks as for 64, but the 64 rows are kSlots adjacent block rows. Each block column
//                  that any of these uses is multiplied for all of them, with zeros for missing
//                  blocks: wgmma has 64 rows, and the other operand is loaded once for all slots.
// A stage holds Parts times TileK of k of both operands: a | b | a | ..; consumers with different
// columns have separate tiles of b. Either operand may be K-major or MN-major; tiles keep the
// layout of the matrix in memory.
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/stmatrix.cuh"

namespace cukit {

// The swizzle of rows of Elements 16-bit elements.
template <int Elements>
constexpr OperandSwizzle kRowSwizzle = Elements == 64   ? OperandSwizzle::Bytes128
                                       : Elements == 32 ? OperandSwizzle::Bytes64
                                                        : OperandSwizzle::Bytes32;

// An operand of wgmma, Extent of m or n by TileK of k. Transposed: MN-major, from a matrix whose
// rows run along k, in parts of PartExtent.
template <typename T, int Extent, int TileK, bool Transposed, int PartExtent = 64>
struct StagedOperand : SharedTile<T, Extent, TileK, kRowSwizzle<TileK>> {
  using Tile = SharedTile<T, Extent, TileK, kRowSwizzle<TileK>>;
  // Descriptor offset of 64 elements along m or n.
  static constexpr int kNext = Tile::rows(64);
  static constexpr int step(int k) { return Tile::k_step(k); }
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile) {
    return Tile::k_major(tile);
  }
};

template <typename T, int Extent, int TileK, int PartExtent>
struct StagedOperand<T, Extent, TileK, true, PartExtent>
    : SharedTile<T, TileK, Extent, kRowSwizzle<PartExtent>> {
  using Tile = SharedTile<T, TileK, Extent, kRowSwizzle<PartExtent>>;
  static constexpr int kNext = 64 / PartExtent * Tile::kPart;
  static constexpr int step(int k) { return Tile::mn_step(k); }
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile) {
    return Tile::mn_major(tile);
  }
};

// TransposedA, TransposedB: MN-major, in parts of PartA and PartB.
template <typename T, int Block, int Columns, int TileK, bool TransposedA, int PartA,
          bool TransposedB, int PartB, int Parts = 1>
struct BsrShape {
  using Element = T;
  static constexpr int kRows = Block < kWarpgroupRows ? kWarpgroupRows : Block;
  static constexpr int kSlots = kRows / Block;  // block rows
  static constexpr int kColumns = Columns;
  static constexpr int kTileK = TileK;
  static constexpr int kSteps = TileK / 16;  // wgmma steps per part
  static constexpr int kParts = Parts;
  static constexpr int kConsumers = 2;
  static constexpr int kRowGroups = kRows / kWarpgroupRows;
  static constexpr int kColumnGroups = kConsumers / kRowGroups;
  static constexpr int kWidth = Columns / kColumnGroups;  // columns per consumer
  static constexpr bool kTransposedA = TransposedA;
  static constexpr bool kTransposedB = TransposedB;
  using TileA = StagedOperand<T, kRows, TileK, TransposedA, PartA>;
  using TileB = StagedOperand<T, kWidth, TileK, TransposedB, PartB>;  // of one consumer
  static constexpr int kPartBytes = TileA::kBytes + kColumnGroups * TileB::kBytes;
  static constexpr int kStageBytes = Parts * kPartBytes;

  static_assert(kRowGroups <= 2, "at most 64 rows per consumer");
  static_assert(kWidth % 64 == 0 && kWidth <= 256, "a legal wgmma width");

  CUKIT_DEVICE static int row_group(int consumer) { return kRowGroups == 1 ? 0 : consumer; }
  CUKIT_DEVICE static int column_group(int consumer) { return kRowGroups == 1 ? consumer : 0; }
};

// Like SharedProduct: both operands come from shared memory.
template <typename Shape, int ClusterSize>
struct BsrProduct {
  using Accumulators = float[Shape::kWidth / 2];
  unsigned long long a, b;  // descriptors of this consumer's operands in stage 0

  CUKIT_DEVICE BsrProduct(const unsigned char* stages, int consumer)
      : a(Shape::TileA::descriptor(stages) + Shape::row_group(consumer) * Shape::TileA::kNext),
        b(Shape::TileB::descriptor(stages + Shape::TileA::kBytes) +
          Shape::column_group(consumer) * Shape::TileB::Tile::kStage) {}

  template <int Stages, typename Tile>
  CUKIT_DEVICE void multiply(Accumulators& acc, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& at, const Tile& tile) const {
    const int steps = tile.end_step - tile.first_step;
    PipelineState<Stages> done;
    for (int step = 0; step < steps; ++step) {
      const unsigned long long stage = at.index * (Shape::kStageBytes / 16);
      pipeline.wait(at);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Shape::kParts * Shape::kSteps; ++i) {
        const int k = i % Shape::kSteps;
        const unsigned long long part = stage + i / Shape::kSteps * (Shape::kPartBytes / 16);
        wgmma<typename Shape::Element, Shape::kWidth, Shape::kTransposedA, Shape::kTransposedB>(
            acc, a + part + Shape::TileA::step(k), b + part + Shape::TileB::step(k),
            step > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait<1>(acc);
      if (step > 0) pipeline.template release_to_cluster<ClusterSize>(done);
      done = at;
      at.advance();
    }
    wgmma_wait<0>(acc);
    pipeline.template release_to_cluster<ClusterSize>(done);
  }
};

// Stores 64 x Columns accumulators through shared memory and TMA, PieceColumns at a time: while TMA
// reads one buffer, the next piece is written to the other.
// Transposed, with pieces of 64 columns only: accumulator rows become columns of the matrix.
template <typename T, int Columns, int PieceColumns = 64, bool Transposed = false>
struct PieceStore {
  using Piece = SharedTile<T, kWarpgroupRows, PieceColumns, kRowSwizzle<PieceColumns>>;
  static constexpr int kPieces = Columns / PieceColumns;
  static constexpr int kBuffers = kPieces > 1 ? 2 : 1;
  static constexpr int kBytes = kBuffers * Piece::kBytes;

  static_assert(!Transposed || PieceColumns == 64, "a transposed piece is square");
  static_assert(kPieces % kBuffers == 0, "the pieces of all tiles use the buffers in turn");

  // Called by all threads of the warpgroup; `barrier`: a named barrier that no other warpgroup
  // uses. One thread calls send(piece, buffer), which may issue the TMA store of that piece.
  template <typename Send>
  CUKIT_DEVICE static void store(const float (&acc)[Columns / 2], unsigned char* buffers, int barrier,
                                 const Send& send) {
    const bool starts = threadIdx.x % kWarpgroupThreads == 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      unsigned char* const buffer = buffers + piece % kBuffers * Piece::kBytes;
      if (starts) bulk_wait_read<kBuffers - 1>();
      named_sync(barrier, kWarpgroupThreads);  // the buffer is free
#pragma unroll
      for (int pair = 0; pair < PieceColumns / 16; ++pair) {
        const float* d = &acc[piece * PieceColumns / 2 + 8 * pair];
        const unsigned packed[4] = {pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]),
                                    pack<T>(d[6], d[7])};
        write_pair(shared_address(buffer), pair, packed);
      }
      fence_proxy_async();
      named_sync(barrier, kWarpgroupThreads);  // the buffer is written
      if (starts) {
        send(piece, buffer);
        bulk_commit();  // commit even an empty group, so that bulk_wait_read counts pieces
      }
    }
  }

  // Call before the block exits: waits until TMA has read the buffers.
  CUKIT_DEVICE static void finish() {
    if (threadIdx.x % kWarpgroupThreads == 0) bulk_wait_read<0>();
  }

 private:
  // Writes the pair-th 16 columns of the piece, for the warp's 16 rows.
  CUKIT_DEVICE static void write_pair(unsigned buffer, int pair, const unsigned (&packed)[4]) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x % kWarpgroupThreads / kWarpSize;
    if constexpr (Transposed) {
      const int row = 16 * pair + lane % 8 + lane / 16 * 8;
      stmatrix_x4_trans(Piece::address(buffer, row, 2 * warp + lane / 8 % 2), packed);
    } else {
      stmatrix_x4(Piece::address(buffer, 16 * warp + lane % 16, 2 * pair + lane / 16), packed);
    }
  }
};

// A static schedule from the host: one row of `work` per cluster, ended by a negative value.
template <typename WorkTile, int ClusterSize>
struct ListedTiles {
  using Tile = WorkTile;
  const int4* work;  // [clusters, turns]
  int turns;

  CUKIT_DEVICE bool tile(int turn, Tile& tile) const {
    const int cluster = static_cast<int>(blockIdx.x) / ClusterSize;
    const int4 item = work[static_cast<long long>(cluster) * turns + turn];
    if (item.x < 0) return false;
    tile = Tile::of(item);
    return true;
  }
};

// The body of a block: a producer warp and two consumers compute the tiles assigned to the block.
// Dynamic shared memory holds the stages, followed by the buffers of the epilogue.
// make_epilogue(buffers, consumer) returns the epilogue. All lanes of the producer warp call
// load_tiles(pipeline, stages, schedule).
template <typename Shape, typename WorkTile, int Stages, int ClusterSize = 1, typename LoadTiles,
          typename MakeEpilogue>
CUKIT_DEVICE void multiply_listed(const int4* work, int turns, const LoadTiles& load_tiles,
                                  const MakeEpilogue& make_epilogue) {
  using Block = WarpSpecialized<Shape::kConsumers, 40>;
  static_assert(THREADS == Block::kThreads, "a producer and two consumers");
  __shared__ Pipeline<Stages> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const ListedTiles<WorkTile, ClusterSize> schedule{work, turns};

  Block::template prepare<ClusterSize>(
      [&] { pipeline.init(ClusterSize * Block::kConsumerWarps); });
  Block::run(
      [&] {
        if (threadIdx.x < kWarpSize) load_tiles(pipeline, stages, schedule);
        leave_cluster<ClusterSize>();
      },
      [&] {
        const int consumer = Block::consumer_group();
        const BsrProduct<Shape, ClusterSize> product(stages, consumer);
        const auto epilogue = make_epilogue(stages + Stages * Shape::kStageBytes, consumer);
        consume(pipeline, schedule, product, epilogue);
        leave_cluster<ClusterSize>();
      });
}

}  // namespace cukit
