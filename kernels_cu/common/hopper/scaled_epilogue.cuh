// Epilogues of products of quantised matrices on Hopper: scales, zero points, bias
// (common/quant/scaled_result.cuh), then one of three kinds of stores (sm_90a).
//
//   Pairs    any type, any number of columns
//   Rows     16-bit results from registers, 64 bytes of a row at a time: columns a multiple of 8
//   Staged   16-bit results through swizzled shared memory and TMA: columns a multiple of 8
//
// ScaledEpilogue stores full tiles; ScaledSplitEpilogue, Pairs or Rows, stores slices of split-K
// tiles (common/hopper/split_k.cuh).
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/split_k.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/quant/scaled_result.cuh"

namespace cukit {

enum class ResultPath { Pairs, Rows, Staged };

// Scales 64 rows x 2 N columns of sums, which start at (row, column), and stores them from
// registers; a few columns at a time, since the factors of all columns would take too many
// registers.
template <ResultPath Path, typename Out, typename Sum, int N>
CUKIT_DEVICE void write_result(const ScaledResult<Out>& result, const Sum (&sums)[N], int row,
                               int column) {
  constexpr int kColumns = 2 * N;
  constexpr int kPiece = kColumns % 32 == 0 ? 32 : kColumns % 16 == 0 ? 16 : 8;
  const int own_row = row + accumulator_row();
  const int end = min(column + kColumns, result.columns);
#pragma unroll
  for (int piece = 0; piece < kColumns / kPiece; ++piece) {
    const int first = column + piece * kPiece;
    const int own_column = first + accumulator_column();
    constexpr int kCount = kPiece / 2;
    if constexpr (kIsExact<Out>) {
      result.template write_pairs<kCount>(sums, piece * kCount, own_row, own_column, end);
    } else {
      float values[kCount];
      result.scale(values, sums, piece * kCount, own_row, own_column);
      if constexpr (Path == ResultPath::Rows) {
        const bool exists[2] = {own_row < result.rows, own_row + 8 < result.rows};
        write_rows<true>(
            values, ResultRows<Out>{{1.0f, 1.0f},
                                    {exists[0], exists[1]},
                                    result.out + static_cast<long long>(own_row) * result.columns + first,
                                    result.columns,
                                    min(kPiece, end - first)});
      } else {
        result.template write_pairs<kCount>(values, 0, own_row, own_column, end);
      }
    }
  }
}

template <typename Shape, typename Out, ResultPath Path>
struct ScaledEpilogue {
  static constexpr int kBytes = 0;
  ScaledResult<Out> result;
  int consumer;

  template <typename Accumulators>
  CUKIT_DEVICE void store(const Accumulators& sums, const MatrixTile& tile) const {
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row =
          Shape::row(tile) + consumer * Shape::kConsumerRows + row_tile * kWarpgroupRows;
      write_result<Path>(result, sums[row_tile], row, Shape::column(tile));
    }
  }

  CUKIT_DEVICE void finish() const {}
};

// The buffers hold a full tile: stores wait only for the copies of the previous tile.
template <typename Shape, typename Out>
struct ScaledEpilogue<Shape, Out, ResultPath::Staged> {
  static constexpr int kPiece = Shape::kTileN % 64 == 0 ? 64 : Shape::kTileN % 32 == 0 ? 32 : 16;
  static constexpr int kRowPieces = Shape::kTileN / kPiece;  // per 64 rows
  static constexpr int kPieces = Shape::kRowTiles * kRowPieces;
  using Store = StagedStore<Out, Shape::kTileN, kPiece, kPieces>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  ScaledResult<Out> result;
  int consumer;
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* map;    // of the result: boxes of [64, kPiece], swizzled

  // Scales of a tile, loaded while its wgmmas run: those of the lane's rows, and in
  // column_scales[j] that of column 32 j + lane of the tile.
  float row_scales[Shape::kRowTiles][2];
  float column_scales[(Shape::kTileN + kWarpSize - 1) / kWarpSize];

  CUKIT_DEVICE void begin(const MatrixTile& tile) {
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row =
            Shape::row(tile) + consumer * Shape::kConsumerRows + row_tile * kWarpgroupRows;
        row_scales[row_tile][half] = result.a.at(row + accumulator_row() + 8 * half, result.rows);
      }
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int j = 0; j * kWarpSize < Shape::kTileN; ++j) {
      column_scales[j] = result.b.at(Shape::column(tile) + j * kWarpSize + lane, result.columns);
    }
  }

  template <typename Accumulators>
  CUKIT_DEVICE void store(const Accumulators& sums, const MatrixTile& tile) const {
    unsigned char* const own = buffers + consumer * Store::kBytes;
    const int first_row = Shape::row(tile) + consumer * Shape::kConsumerRows;
    const int first_column = Shape::column(tile);
    Store::acquire(1 + consumer);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row_tile = i / kRowPieces;
      const int first = i % kRowPieces * kPiece;  // column of the tile
      const auto scale_of = [&](int n, int j) {
        const int at = first + 8 * n;
        return result.b.scales == nullptr
                   ? 1.0f
                   : __shfl_sync(kFullMask, column_scales[at / kWarpSize],
                                 at % kWarpSize + accumulator_column() + j);
      };
      float values[kPiece / 2];
      result.scale(values, sums[row_tile], first / 2,
                   first_row + row_tile * kWarpgroupRows + accumulator_row(),
                   first_column + first + accumulator_column(), row_scales[row_tile], scale_of);
      Store::write(values, own + i * Store::Piece::kBytes);
    }
    Store::send(kPieces, own, 1 + consumer, [&](int i, const unsigned char* buffer) {
      const int row = first_row + i / kRowPieces * kWarpgroupRows;
      const int column = first_column + i % kRowPieces * kPiece;
      if (row < result.rows) Store::Piece::store(map, buffer, column, row, result.columns);
    });
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

template <typename Shape, typename Out, ResultPath Path, int Splits>
struct ScaledSplitEpilogue {
  using Sum = typename AccumulatorOf<typename Shape::Element>::Type;
  using Sums = SplitSums<Shape, Sum, Splits>;
  static constexpr int kBytes = Sums::kBytes;
  static_assert(Sums::kColumns % Sums::kSliceColumns == 0, "all slices are equally wide");
  ScaledResult<Out> result;
  int consumer;
  Sums sums;  // kBytes of shared memory

  template <typename Accumulators>
  CUKIT_DEVICE void store(const Accumulators& partial, const MatrixTile& tile) const {
    typename Sums::Slice own;
    if (!sums.exchange(own, partial, [] {})) return;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row =
          Shape::row(tile) + consumer * Shape::kConsumerRows + row_tile * kWarpgroupRows;
      write_result<Path>(result, own[row_tile], row, Sums::first_column(tile));
    }
  }

  CUKIT_DEVICE void finish() const {}
};

}  // namespace cukit
