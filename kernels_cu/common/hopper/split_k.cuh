// Split-K (sm_90a): each block of a cluster accumulates a share of a tile's k steps, and the blocks
// reduce their accumulators through distributed shared memory.
//
//   every block    accumulators -> slice t of the columns -> st.async to block t
//   block t        own slice + the others' slices, in a fixed order -> transform -> out
//
// The schedule is DenseTiles with one split per block of the cluster, on a grid of one cluster per
// tile, so that the receive buffer is never reused. All threads of the cluster call cluster_arrive
// before the main loop. The consumers call cluster_wait in exchange(), before their first remote
// store; the other blocks have normally arrived by then.
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"

namespace cukit {

// Columns of a slice: a multiple of eight. The last slice may have fewer, and there may be fewer
// slices than blocks.
constexpr int slice_columns(int columns, int splits) {
  return (columns / 8 + splits - 1) / splits * 8;
}

// Reduces accumulators across the cluster. Parts: Transform::kParts
// (common/hopper/gemm_epilogue.cuh); each part is divided into slices.
template <typename Shape, typename Sum, int Splits, int Parts = 1>
struct SplitSums {
  static constexpr int kColumns = Shape::kTileN / Parts;  // of the result
  static constexpr int kSliceColumns = slice_columns(kColumns, Splits);
  static constexpr int kSlices = (kColumns + kSliceColumns - 1) / kSliceColumns;
  static constexpr int kPart = kColumns / 2;            // a thread's accumulators per part
  static constexpr int kPartSlice = kSliceColumns / 2;  // the same per slice of a part
  static constexpr int kSlice = Parts * kPartSlice;
  static constexpr int kWords = Shape::kRowTiles * kSlice / 4;  // of 16 bytes, per thread
  static constexpr int kThreads = Shape::kConsumers * kWarpgroupThreads;
  static constexpr int kBytes = (Splits - 1) * kWords * kThreads * 16;
  using Slice = Sum[Shape::kRowTiles][kSlice];

  float4* received;           // kBytes of shared memory: [Splits - 1][kWords][kThreads]
  StageBarriers<1>* arrived;  // initialised with one arrival

  // First column of this block's slice, and end of the tile's columns, in the result.
  CUKIT_DEVICE static int first_column(const MatrixTile& tile) {
    return tile.n * kColumns + cluster_rank() * kSliceColumns;
  }
  CUKIT_DEVICE static int end_column(const MatrixTile& tile) { return (tile.n + 1) * kColumns; }

  // Reduces the accumulators of all blocks into `own`, this block's slice; returns false if this
  // block has no slice.
  // Calls `meanwhile` while the other blocks' accumulators are in flight.
  template <typename Accumulators, typename Meanwhile>
  CUKIT_DEVICE bool exchange(Slice& own, const Accumulators& sums, const Meanwhile& meanwhile) const {
    const int rank = cluster_rank();
    const int thread = threadIdx.x - kWarpgroupThreads;
    const PipelineState<1> once;
    const int columns = min(kSliceColumns, kColumns - rank * kSliceColumns);  // of this slice
    if (thread == 0 && rank < kSlices) arrived->expect(once, kBytes / kSliceColumns * columns);
    cluster_wait();
#pragma unroll
    for (int to = 0; to < kSlices; ++to) {
      // Block `to` receives the accumulators of block (to + 1 + i) % Splits in slot i.
      const int slot = (rank - to - 1 + Splits) % Splits;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int row_tile = word * 4 / kSlice;
        const int within = word * 4 % kSlice;  // of the slice
        const int in_part = to * kPartSlice + within % kPartSlice;
        const bool exists = in_part < kPart;  // the last slice may have fewer columns
        const int from = exists ? within / kPartSlice * kPart + in_part : 0;
        const Sum* const four = &sums[row_tile][from];
        if (to == rank) {
#pragma unroll
          for (int i = 0; i < 4; ++i) own[row_tile][within + i] = four[i];
        } else if (exists) {
          store_async_remote(
              &received[(slot * kWords + word) * kThreads + thread], to,
              make_float4(bits(four[0]), bits(four[1]), bits(four[2]), bits(four[3])),
              &arrived->stage[0]);
        }
      }
    }
    if (rank >= kSlices) return false;
    meanwhile();
    mbarrier_wait_cluster(&arrived->stage[0], 0);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int within = word * 4 % kSlice;
      Sum* const to = &own[word * 4 / kSlice][within];
      if (kColumns % kSliceColumns != 0 && 2 * (within % kPartSlice) >= columns) continue;
#pragma unroll
      for (int slot = 0; slot < Splits - 1; ++slot) {
        const float4 other = received[(slot * kWords + word) * kThreads + thread];
        add(to[0], other.x);
        add(to[1], other.y);
        add(to[2], other.z);
        add(to[3], other.w);
      }
    }
    return true;
  }

 private:
  // Integer accumulators are sent as floats with the same bits.
  CUKIT_DEVICE static float bits(float sum) { return sum; }
  CUKIT_DEVICE static float bits(int sum) { return __int_as_float(sum); }
  CUKIT_DEVICE static void add(float& to, float sum) { to += sum; }
  CUKIT_DEVICE static void add(int& to, float sum) { to += __float_as_int(sum); }
};

// Transform: as for StagedEpilogue, applied to slices. Transposed: stores the transpose of the
// product.
template <typename Shape, typename T, int Splits, bool Transposed, typename Transform = Identity>
struct SplitEpilogue {
  using Sums = SplitSums<Shape, float, Splits, Transform::kParts>;
  static constexpr int kSliceColumns = Sums::kSliceColumns;
  static constexpr int kPartSlice = Sums::kPartSlice;
  static constexpr int kSlice = Sums::kSlice;
  static constexpr int kBytes = Sums::kBytes;

  float4* received;           // kBytes of shared memory
  StageBarriers<1>* arrived;  // initialised with one arrival
  T* out;
  T* kept;                    // [rows, kParts * columns]; with Transform::kKeeps
  int rows, columns;          // of the product; with kParts 2, columns of the result
  int consumer;
  Transform transform;

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) {
    const int column = Sums::first_column(tile);
    const int first_row = Shape::row(tile) + consumer * Shape::kConsumerRows;
    typename Sums::Slice own;
    const auto begin = [&] { transform.begin(first_row, column); };
    if (!Sums{received, arrived}.exchange(own, sums, begin)) return;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = first_row + row_tile * kWarpgroupRows;
      if (row_tile > 0) transform.begin(row, column);
      write(own[row_tile], row, column, min(columns, Sums::end_column(tile)));
    }
  }

  CUKIT_DEVICE void finish() const {}

 private:
  // `end`: end of the tile's columns.
  CUKIT_DEVICE void write(float (&sums)[kSlice], int row, int column, int end) {
    const long long stride = Transposed ? rows : columns;
    transform.prepare(sums, row, column);
    if constexpr (Transform::kKeeps) {
      constexpr int kParts = Transform::kParts;
      write_pairs<Transposed, kSliceColumns>(sums, kept, kParts * stride, row, column, rows, end);
      if constexpr (kParts == 2) {
        write_pairs<Transposed, kSliceColumns, kPartSlice>(sums, kept + columns, 2 * stride, row,
                                                           column, rows, end);
      }
    }
    transform(sums, row, column);
    write_pairs<Transposed, kSliceColumns>(sums, out, stride, row, column, rows, end);
  }
};

}  // namespace cukit
