// Epilogues of products of quantised matrices on Hopper: scales, zero points, bias
// (common/quant/scaled_result.cuh), then one of three ways to memory (sm_90a).
//
//   Pairs    any type, any number of columns
//   Rows     16-bit results from registers, 64 bytes of a row at a time: columns a multiple of 8
//   Staged   16-bit results through swizzled shared memory and TMA: columns a multiple of 8
//
// ScaledEpilogue writes whole tiles; ScaledSplitEpilogue, Pairs or Rows, what the blocks of a cluster
// have summed up together (common/hopper/split_k.cuh).
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/split_k.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/quant/scaled_result.cuh"

namespace cukit {

enum class ResultPath { Pairs, Rows, Staged };

// Scales and writes 64 rows of sums that begin at (row, column), 2 N columns wide, from registers; some
// columns at a time: the factors of all would take too many.
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

// Buffers: pieces of a consumer that are on their way at a time, of Staged.
template <typename Shape, typename Out, ResultPath Path, int Buffers>
struct ScaledEpilogue {
  static constexpr int kBytes = 0;
  ScaledResult<Out> result;
  int group;  // this consumer

  template <typename Accumulators>
  CUKIT_DEVICE void store(const Accumulators& sums, const MatrixTile& tile) const {
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
      write_result<Path>(result, sums[row_tile], row, Shape::column(tile));
    }
  }

  CUKIT_DEVICE void finish() const {}
};

template <typename Shape, typename Out, int Buffers>
struct ScaledEpilogue<Shape, Out, ResultPath::Staged, Buffers> {
  static constexpr int kPiece = Shape::kTileN % 64 == 0 ? 64 : Shape::kTileN % 32 == 0 ? 32 : 16;
  using Store = StagedStore<Out, Shape::kTileN, kPiece, Buffers>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
  ScaledResult<Out> result;
  int group;               // this consumer
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* map;    // of the result: boxes of [64, kPiece], swizzled

  template <typename Accumulators>
  CUKIT_DEVICE void store(const Accumulators& sums, const MatrixTile& tile) const {
    unsigned char* const own = buffers + group * Store::kBytes;
    const int column = Shape::column(tile);
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
#pragma unroll
      for (int first = 0; first < Store::kPieces; first += Buffers) {
        const int count = first + Buffers <= Store::kPieces ? Buffers : Store::kPieces - first;
        Store::acquire(1 + group);
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const int piece = first + i;
          float values[kPiece / 2];
          result.scale(values, sums[row_tile], piece * (kPiece / 2), row + accumulator_row(),
                       column + piece * kPiece + accumulator_column());
          Store::write(values, own + i * Store::Piece::kBytes);
        }
        Store::send(count, own, map, column + first * kPiece, row, result.columns, result.rows,
                    1 + group);
      }
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

template <typename Shape, typename Out, ResultPath Path, int Splits>
struct ScaledSplitEpilogue {
  using Sum = typename AccumulatorOf<typename Shape::Element>::Type;
  using Sums = SplitSums<Shape, Sum, Splits>;
  static constexpr int kBytes = Sums::kBytes;
  static_assert(Sums::kColumns % Sums::kSliceColumns == 0, "every slice has as many columns");
  ScaledResult<Out> result;
  int group;  // this consumer
  Sums sums;  // kBytes of shared memory

  template <typename Accumulators>
  CUKIT_DEVICE void store(const Accumulators& partial, const MatrixTile& tile) const {
    typename Sums::Slice own;
    if (!sums.exchange(own, partial, [] {})) return;
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
      write_result<Path>(result, own[row_tile], row, Sums::first_column(tile));
    }
  }

  CUKIT_DEVICE void finish() const {}
};

}  // namespace cukit
