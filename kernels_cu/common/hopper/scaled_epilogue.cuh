// The epilogue of products of quantised matrices on Hopper: scales, zero points, bias
// (common/quant/scaled_result.cuh), then one of three ways to memory (sm_90a).
//
//   Pairs    any type, any number of columns
//   Rows     16-bit results from registers, 64 bytes of a row at a time: columns a multiple of 8
//   Staged   16-bit results through swizzled shared memory and TMA: columns a multiple of 8, tiles a
//            multiple of 64 wide
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/quant/scaled_result.cuh"

namespace cukit {

enum class ResultPath { Pairs, Rows, Staged };

// Shared memory for results on their way.
template <typename Shape, typename Out, ResultPath Path>
struct ResultStage {
  static constexpr int kBytes = 0;
};

template <typename Shape, typename Out>
struct ResultStage<Shape, Out, ResultPath::Staged> {
  using Store = StagedStore<Out, Shape::kTileN, 64, Shape::kTileN % 128 == 0 ? 2 : 1>;
  static constexpr int kBytes = Shape::kConsumers * Store::kBytes;
};

template <typename Shape, typename Out, ResultPath Path>
struct ScaledEpilogue {
  using Stage = ResultStage<Shape, Out, Path>;
  ScaledResult<Out> result;
  unsigned char* buffers;  // Stage::kBytes of shared memory
  const TensorMap* map;    // of Staged: boxes of [64, 64], swizzled
  int group;               // this consumer

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& sums, const MatrixTile& tile) const {
    const int column = Shape::column(tile);
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = Shape::row(tile) + group * Shape::kGroupRows + row_tile * kWarpgroupRows;
      write(sums[row_tile], row, column);
    }
  }

  CUKIT_DEVICE void finish() const {
    if constexpr (Path == ResultPath::Staged) Stage::Store::finish();
  }

 private:
  // Columns that are scaled and stored together.
  static constexpr int kPiece = Path == ResultPath::Staged ? 64 : Shape::kTileN % 32 == 0 ? 32 : 16;

  // 64 rows of the tile, which begin at (row, column).
  template <typename Sum>
  CUKIT_DEVICE void write(const Sum (&sums)[Shape::kTileN / 2], int row, int column) const {
    const int own_row = row + accumulator_row();
    const int end = min(column + Shape::kTileN, result.columns);
#pragma unroll
    for (int piece = 0; piece < Shape::kTileN / kPiece; ++piece) {
      const int first = column + piece * kPiece;
      const int own_column = first + accumulator_column();
      Sum own[kPiece / 2];
#pragma unroll
      for (int i = 0; i < kPiece / 2; ++i) own[i] = sums[piece * (kPiece / 2) + i];
      if constexpr (kIsExact<Out>) {
        result.write_pairs(own, own_row, own_column, end);
      } else {
        float values[kPiece / 2];
        result.scale(values, own, own_row, own_column);
        if constexpr (Path == ResultPath::Staged) {
          Stage::Store::store_piece(piece, values, buffers + group * Stage::Store::kBytes, map, column,
                                    row, result.columns, result.rows, 1 + group);
        } else if constexpr (Path == ResultPath::Rows) {
          Out* const to = result.out + static_cast<long long>(own_row) * result.columns + first;
          const bool exists[2] = {own_row < result.rows, own_row + 8 < result.rows};
          write_rows<true>(values, ResultRows<Out>{{1.0f, 1.0f},
                                                   {exists[0], exists[1]},
                                                   to,
                                                   result.columns,
                                                   min(kPiece, end - first)});
        } else {
          result.write_pairs(values, own_row, own_column, end);
        }
      }
    }
  }
};

}  // namespace cukit
