// Epilogues of dense products (sm_90a) for the skeleton of common/hopper/gemm.cuh.
//
//   StagedEpilogue       transforms a tile and stores it through shared memory and TMA
//   OverlappedEpilogue   the same in steps that overlap the products of the next tile
//   TransposedEpilogue   stores the transpose
//
// SplitEpilogue, for split-K tiles, is in common/hopper/split_k.cuh.
#pragma once

#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/tile_scheduler.cuh"

namespace cukit {

// The interface of a Transform, applied to 64 rows of accumulators before they are rounded. The
// arguments (row, column) are the position of their first element in the product.
//   kParts      columns of the product per column of the result: 2 if halves of a tile are combined
//   kKeeps      whether the result of prepare() is stored too (to `kept`)
//   begin()     issues the loads for prepare(), which overlap the products
//   prepare()   bias, scales
//   operator()  activation; with kParts 2 the results go to the first half
// The transform that changes nothing:
struct Identity {
  static constexpr int kParts = 1;
  static constexpr bool kKeeps = false;
  CUKIT_DEVICE void begin(int, int) const {}
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
  int consumer;
  Transform transform;
  const TensorMap* kept = nullptr;     // kKeeps: [rows, columns] for the first part, boxes as `out`
  const TensorMap* kept_up = nullptr;  // kKeeps, kParts 2: the same for the second part

  CUKIT_DEVICE void begin(const MatrixTile& tile) {
    transform.begin(Shape::row(tile) + consumer * Shape::kConsumerRows, tile.n * kColumns);
  }

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) {
    unsigned char* const buffer = buffers + consumer * Store::kBytes;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row =
          Shape::row(tile) + consumer * Shape::kConsumerRows + row_tile * kWarpgroupRows;
      const int column = tile.n * kColumns;
      if (row_tile > 0) transform.begin(row, column);
      transform.prepare(sums[row_tile], row, column);
      if constexpr (Transform::kKeeps) {
        Store::template store<0>(sums[row_tile], buffer, kept, column, row, columns, rows,
                                 1 + consumer);
        if constexpr (Transform::kParts == 2) {
          Store::template store<kColumns / 2>(sums[row_tile], buffer, kept_up, column, row, columns,
                                              rows, 1 + consumer);
        }
      }
      transform(sums[row_tile], row, column);
      Store::template store<0>(sums[row_tile], buffer, out, column, row, columns, rows,
                               1 + consumer);
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

// As StagedEpilogue, in steps of kStepColumns, for consume_overlapped(). Each step applies
// Transform to a copy of kStepColumns columns of the accumulators.
template <typename Shape, typename T, typename Transform>
struct OverlappedEpilogue {
  static constexpr int kStepColumns = 32;
  static constexpr int kSteps = Shape::kTileN / kStepColumns;
  static constexpr int kPieceColumns = Shape::kTileN % 64 == 0 ? 64 : 32;
  using Store = StagedStore<T, Shape::kTileN, kPieceColumns, 2>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  static_assert(Shape::kTileN % kStepColumns == 0, "full steps");
  static_assert(Shape::kRowTiles == 1, "accumulators of two tiles fit into registers");
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* out;    // boxes of [64, kPieceColumns], swizzled
  int rows, columns;       // of the result
  int consumer;
  Transform transform;

  template <typename Accumulators>
  CUKIT_DEVICE void store_step(const Accumulators& sums, const MatrixTile& tile, int step) {
    constexpr int kValues = kStepColumns / 2;  // per thread
    const int row = Shape::row(tile) + consumer * Shape::kConsumerRows;
    const int first = step * kStepColumns;
    const int column = tile.n * Shape::kTileN + first;
    float values[kValues];
    transform.begin(row, column);
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = sums[0][step * kValues + i];
    transform.prepare(values, row, column);
    transform(values, row, column);
    Store::template store_part<kStepColumns>(values, buffers + consumer * Store::kBytes, out,
                                             column, row, columns, rows, 1 + consumer, first);
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

// As StagedEpilogue, but the result is the product's transpose: rows of a are columns of the
// result.
template <typename Shape, typename T, typename Transform = Identity>
struct TransposedEpilogue {
  using Store = TransposedStore<T, Shape::kTileN>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* out;    // boxes of [kTileN, 64], swizzled
  int rows, columns;       // of the product
  int consumer;
  Transform transform;
  const TensorMap* kept = nullptr;

  CUKIT_DEVICE void begin(const MatrixTile& tile) {
    transform.begin(Shape::row(tile) + consumer * Shape::kConsumerRows, Shape::column(tile));
  }

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) {
    unsigned char* const buffer = buffers + consumer * Store::kBytes;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row =
          Shape::row(tile) + consumer * Shape::kConsumerRows + row_tile * kWarpgroupRows;
      const int column = Shape::column(tile);
      if (row_tile > 0) transform.begin(row, column);
      transform.prepare(sums[row_tile], row, column);
      if constexpr (Transform::kKeeps) {
        Store::store(sums[row_tile], buffer, kept, row, column, rows, columns, 1 + consumer);
      }
      transform(sums[row_tile], row, column);
      Store::store(sums[row_tile], buffer, out, row, column, rows, columns, 1 + consumer);
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace cukit
