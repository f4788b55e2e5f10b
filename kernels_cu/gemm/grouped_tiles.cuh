// Grouped versions of the building blocks in common/hopper/gemm.cuh.
//
// Row r of group g is multiplied by matrix g; gemm/groups.cuh describes where groups are stored.
//
// Ragged matrices, whose rows are those of the groups, use sequence maps (encode_sequence_map in
// cukit/core/tensor_map.py): rows beyond the end of a group read as zeros and are not written,
// although the next group may start there. Zeros also cost the tensor cores less power than the
// next group's rows.
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/platform.cuh"
#include "gemm/groups.cuh"
#include "gemm/parameters.cuh"

namespace cukit {

// A tile of the product of one group.
struct GroupTile {
  int m, n;  // first row and column
  int first_step, end_step;
  int group;
  int length;      // rows of the group
  MatrixRow rows;  // the group's first row, in the maps of ragged matrices

  // The group's first row, counted over all groups.
  CUKIT_DEVICE int first_row() const { return rows.matrix - length; }
};

// The tiles of all groups in a static schedule, group by group. Columns: result columns of a tile.
template <Ragged kRagged, int TileM, int Columns>
struct GroupedTiles {
  using Tile = GroupTile;
  const GroupedParameters& p;
  Groups groups;
  const int* starts;  // from count_tiles; not used with ragged k

  CUKIT_DEVICE bool tile(int turn, Tile& tile) const {
    int index = static_tile(turn);
    MatrixTiles tiles{(p.m + TileM - 1) / TileM, (p.n + Columns - 1) / Columns, p.raster_group,
                      p.steps, 1};
    if constexpr (kRagged == Ragged::K) {
      tile.group = index / tiles.count();
      if (tile.group >= p.groups) return false;
      index -= tile.group * tiles.count();
    } else {
      const int others = kRagged == Ragged::M ? tiles.tiles_n : tiles.tiles_m;
      const int at = index / others;
      if (at >= starts[p.groups]) return false;
      tile.group = group_of_tile(starts, p.groups, at);
      const int own = starts[tile.group + 1] - starts[tile.group];
      (kRagged == Ragged::M ? tiles.tiles_m : tiles.tiles_n) = own;
      index -= starts[tile.group] * others;
    }
    const MatrixTile found = tiles.at(index);
    tile.length = groups.length(tile.group);
    tile.rows = {groups.first_row(tile.group) + tile.length, groups.longest - tile.length};
    tile.m = found.m * TileM;
    tile.n = found.n * Columns;
    tile.first_step = 0;
    tile.end_step = kRagged == Ragged::K ? (tile.length + kDepth - 1) / kDepth : p.steps;
    return true;
  }

 private:
  static constexpr int kDepth = 64;  // rows of 16-bit elements per k step
};

// Loads a and b through maps [matrices, rows, columns], with boxes as for DenseOperands. Parts 2: b
// is gate followed by up, and each tile has columns of both, as in PairedOperands.
template <typename Shape, Ragged kRagged, int Parts>
struct GroupedOperands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  const TensorMap* a;
  const TensorMap* b;
  int m, n;  // extents that all groups share

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const GroupTile& tile, int step) const {
    using TileA = typename Shape::TileA;
    const int k = step * Shape::kTileK;
    const MatrixRow own{tile.group, 0};
    TileA::load(stage, a, full, k, tile.m, kRagged == Ragged::N ? own : tile.rows, m);
    unsigned char* const second = stage + TileA::kBytes;
    if constexpr (Parts == 2) {
      using Half = OperandTile<typename Shape::Element, Shape::kTileN / 2, Shape::kTileK, Major::K>;
      Half::load(second, b, full, k, tile.n, own, n);
      Half::load(second + Half::kBytes, b, full, k, n + tile.n, own, n);
    } else {
      Shape::TileB::load(second, b, full, k, tile.n, kRagged == Ragged::M ? own : tile.rows, n);
    }
  }
};

// SharedProduct for groups that may have no k steps. Clearing the accumulators also makes them dead
// between tiles, so that they occupy no registers while the schedule searches for the next tile.
template <typename Shape>
struct GroupedProduct : SharedProduct<Shape> {
  using SharedProduct<Shape>::SharedProduct;

  template <int Stages>
  CUKIT_DEVICE void multiply(typename SharedProduct<Shape>::Accumulators& acc,
                             Pipeline<Stages>& pipeline, PipelineState<Stages>& at,
                             const GroupTile& tile) const {
#pragma unroll
    for (int row = 0; row < Shape::kRowTiles; ++row)
#pragma unroll
      for (int i = 0; i < Shape::kTileN / 2; ++i) acc[row][i] = 0.0f;
    if (tile.end_step > 0) SharedProduct<Shape>::multiply(acc, pipeline, at, tile);
  }
};

// StagedEpilogue for the results of groups; TransposedEpilogue with ragged n.
template <typename Shape, typename T, Ragged kRagged, typename Transform>
struct GroupedEpilogue {
  static constexpr bool kTransposed = kRagged == Ragged::N;
  using Plain = StagedEpilogue<Shape, T, Transform>;
  using Transposed = TransposedEpilogue<Shape, T, Transform>;
  static constexpr int kColumns = Plain::kColumns;
  static constexpr int kBytes = kTransposed ? Transposed::kBytes : Plain::kBytes;
  unsigned char* buffers;  // kBytes of shared memory
  const TensorMap* out;    // boxes [1, 64, kPieceColumns]; transposed: [1, kTileN, 64]
  const TensorMap* kept;   // of the values that Transform keeps: kParts times the columns of out
  int m, n;                // extents that all groups share
  int consumer;
  Transform transform;

  template <typename Accumulators>
  CUKIT_DEVICE void store(Accumulators& acc, const GroupTile& tile) {
#pragma unroll
    for (int row_tile = 0; row_tile < Shape::kRowTiles; ++row_tile) {
      const int row = tile.m + consumer * Shape::kConsumerRows + row_tile * kWarpgroupRows;
      if (row >= (kRagged == Ragged::M ? tile.length : m)) break;
      transform.begin(row, tile.n);
      transform.prepare(acc[row_tile], row, tile.n);
      if constexpr (Transform::kKeeps) {
        send<0>(acc[row_tile], kept, tile, row, tile.n, Transform::kParts * n);
        if constexpr (Transform::kParts == 2) {
          send<kColumns / 2>(acc[row_tile], kept, tile, row, n + tile.n, 2 * n);
        }
      }
      transform(acc[row_tile], row, tile.n);
      send<0>(acc[row_tile], out, tile, row, tile.n, n);
    }
  }

  CUKIT_DEVICE void finish() const { Plain::Store::finish(); }

 private:
  template <int First, int N>
  CUKIT_DEVICE void send(const float (&acc)[N], const TensorMap* map, const GroupTile& tile, int row,
                         int column, int columns) const {
    if constexpr (kTransposed) {
      using Store = typename Transposed::Store;
      unsigned char* const buffer = buffers + consumer * Store::kBytes;
      Store::store_piece(acc, buffer, 1 + consumer, [&] {
        Store::Piece::store(map, buffer, row, tile.rows.below(tile.n), m);
      });
    } else {
      using Store = typename Plain::Store;
      const MatrixRow origin = kRagged == Ragged::K ? MatrixRow{tile.group, 0} : tile.rows;
      Store::template store_pieces<First>(
          acc, buffers + consumer * Store::kBytes, 1 + consumer,
          [&](int piece, const unsigned char* buffer) {
            Store::Piece::store(map, buffer, column + piece * Plain::kPieceColumns,
                                origin.below(row), columns);
          });
    }
  }
};

}  // namespace cukit
