// Split k (sm_90a): the blocks of a cluster sum up a share of a tile's steps each, and then add their
// sums through distributed shared memory.
//
//   every block    accumulators -> slice t of the columns -> st.async to block t
//   block t        own slice + those of the others, in a fixed order -> transform -> out
//
// The schedule is DenseTiles with as many splits as the cluster has blocks, and a grid of as many
// clusters as there are tiles: each computes one, so that the memory which receives is never used
// twice. Before the first access to another block every thread of the cluster comes to cluster_arrive;
// store() is where the consumers wait for it, long after.
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"

namespace cukit {

// A power of two up to `splits`, so that each slice has a multiple of eight columns.
constexpr int slices_of(int columns, int splits) {
  int slices = splits;
  while (columns % (8 * slices) != 0) slices /= 2;
  return slices;
}

constexpr int slice_columns(int columns, int splits) { return columns / slices_of(columns, splits); }

// Transform: as for StagedEpilogue, of slices. Transposed: the transpose of the product is the result.
template <typename Shape, typename T, int Splits, bool Transposed, typename Transform = Identity>
struct SplitEpilogue {
  static constexpr int kColumns = Shape::kTileN / Transform::kParts;  // of the result
  static constexpr int kSlices = slices_of(kColumns, Splits);
  static constexpr int kSliceColumns = slice_columns(kColumns, Splits);
  static constexpr int kPart = kColumns / 2;             // a thread's accumulators of a part
  static constexpr int kPartSlice = kSliceColumns / 2;  // and of a slice of it
  static constexpr int kSlice = Transform::kParts * kPartSlice;
  static constexpr int kWords = Shape::kRowTiles * kSlice / 4;  // of 16 bytes
  static constexpr int kThreads = Shape::kConsumers * kWarpgroupThreads;
  static constexpr int kBytes = (Splits - 1) * kWords * kThreads * 16;

  float4* received;           // kBytes of shared memory: [Splits - 1][kWords][kThreads]
  StageBarriers<1>* arrived;  // one arrival
  T* out;
  T* kept;                    // [rows, kParts * columns] of the result
  int rows, columns;          // of the product; with kParts 2 of the result
  int group;                  // this consumer
  Transform transform;

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) {
    const int rank = cluster_rank();
    const int thread = threadIdx.x - kWarpgroupThreads;
    const PipelineState<1> once;
    if (thread == 0 && rank < kSlices) arrived->expect(once, kBytes);
    cluster_wait();
    float own[Shape::kRowTiles][kSlice];
#pragma unroll
    for (int to = 0; to < kSlices; ++to) {
      // Block `to` keeps the sums of block to + 1 + i in place i.
      const int place = (rank - to - 1 + Splits) % Splits;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int row_tile = word * 4 / kSlice;
        const int within = word * 4 % kSlice;  // of the slice
        const int from = within / kPartSlice * kPart + to * kPartSlice + within % kPartSlice;
        const float* const four = &sums[row_tile][from];
        if (to == rank) {
#pragma unroll
          for (int i = 0; i < 4; ++i) own[row_tile][within + i] = four[i];
        } else {
          store_async_remote(&received[(place * kWords + word) * kThreads + thread], to,
                             make_float4(four[0], four[1], four[2], four[3]),
                             &arrived->stage[0]);
        }
      }
    }
    if (rank >= kSlices) return;
    const int column = tile.n * kColumns + rank * kSliceColumns;
    const int first_row = Shape::row(tile) + group * Shape::kGroupRows;
    transform.begin(first_row, column);
    mbarrier_wait_cluster(&arrived->stage[0], 0);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      float* const to = &own[word * 4 / kSlice][word * 4 % kSlice];
#pragma unroll
      for (int place = 0; place < Splits - 1; ++place) {
        const float4 other = received[(place * kWords + word) * kThreads + thread];
        to[0] += other.x;
        to[1] += other.y;
        to[2] += other.z;
        to[3] += other.w;
      }
    }
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = first_row + row_tile * kWarpgroupRows;
      if (row_tile > 0) transform.begin(row, column);
      write(own[row_tile], row, column);
    }
  }

  CUKIT_DEVICE void finish() const {}

 private:
  CUKIT_DEVICE void write(float (&sums)[kSlice], int row, int column) {
    const long long stride = Transposed ? rows : columns;
    transform.prepare(sums, row, column);
    if constexpr (Transform::kKeeps) {
      constexpr int kParts = Transform::kParts;
      write_pairs<Transposed, kSliceColumns>(sums, kept, kParts * stride, row, column, rows, columns);
      if constexpr (kParts == 2) {
        write_pairs<Transposed, kSliceColumns, kPartSlice>(sums, kept + columns, 2 * stride, row,
                                                           column, rows, columns);
      }
    }
    transform(sums, row, column);
    write_pairs<Transposed, kSliceColumns>(sums, out, stride, row, column, rows, columns);
  }
};

}  // namespace cukit
