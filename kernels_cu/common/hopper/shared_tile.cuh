// Tiles in shared memory that TMA fills and wgmma reads (sm_90).
//
// A tile of Rows x Columns elements is stored in parts as wide as the swizzle. A part is Rows rows
// of kRowBytes contiguous bytes, with 16-byte chunks permuted by the swizzle; parts are stored in
// the order of their columns:
//
//   columns        0 .. 63        64 .. 127           (16-bit elements, 128-byte swizzle)
//   row 0        [128 bytes]     [128 bytes]
//   row 1        [128 bytes]     [128 bytes]
//   ...            part 0          part 1
//
// One TMA box fills one part: box(rows, part columns) of a tensor map with the same swizzle.
// Without a swizzle a part is 16 bytes wide, so that eight of its rows are a contiguous wgmma core
// matrix.
//
// Offsets are added to the 64-bit descriptors of wgmma operands: descriptor of a tile + stage +
// rows + step. All offsets are constants, or constants times a stage or warpgroup index, so that
// they stay in uniform registers.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace cukit {

// Width of the swizzle pattern in bytes; without a swizzle, the width of a chunk.
constexpr int swizzle_bytes(OperandSwizzle swizzle) {
  return swizzle == OperandSwizzle::Bytes128  ? 128
         : swizzle == OperandSwizzle::Bytes64 ? 64
         : swizzle == OperandSwizzle::Bytes32 ? 32
                                              : 16;
}

// A row of one of several matrices, in a map [matrices, rows, columns].
struct MatrixRow {
  int matrix, row;

  CUKIT_DEVICE MatrixRow below(int rows) const { return {matrix, row + rows}; }
};

template <typename T, int Rows, int Columns, OperandSwizzle Swizzle = OperandSwizzle::Bytes128>
struct SharedTile {
  static constexpr int kRows = Rows;
  static constexpr int kColumns = Columns;
  static constexpr int kRowBytes = swizzle_bytes(Swizzle);  // of a part
  static constexpr int kPartColumns = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kParts = (Columns + kPartColumns - 1) / kPartColumns;
  static constexpr int kPartBytes = Rows * kRowBytes;
  static constexpr int kBytes = kParts * kPartBytes;

  static_assert(Rows % 8 == 0 && Rows <= 256, "groups of eight rows, in one TMA box");
  static_assert(kPartBytes % (8 * kRowBytes) == 0, "complete swizzle periods");

  // ---- Filling and storing: one thread ----

  // Loads the tile at (row, column) of a map [rows, columns]. kBytes complete at `full`; rows and
  // columns outside the tensor are zeros. The tile's first row and the first column of every part
  // must be inside the tensor.
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full,
                                int column, int row) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      tma_load_2d(tile + part * kPartBytes, map, full, column + part * kPartColumns, row);
    }
  }

  // The same from a map [matrices, rows, columns]. A part that would start beyond the last column
  // is loaded from the tile's first columns instead: a box of a sequence map (encode_sequence_map)
  // must not be entirely outside the tensor.
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full,
                                int column, const MatrixRow& at, int columns) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = column + part * kPartColumns;
      tma_load_3d(tile + part * kPartBytes, map, full, first < columns ? first : column, at.row,
                  at.matrix);
    }
  }

  // The same from a map [batch, rows, heads, columns], from column 0 on.
  CUKIT_DEVICE static void load(unsigned char* tile, const TensorMap* map, Mbarrier* full, int head,
                                int row, int batch) {
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      tma_load_4d(tile + part * kPartBytes, map, full, part * kPartColumns, head, row, batch);
    }
  }

  // Loads rows `first` .. `first` + Share - 1 of the tile into every block of the cluster whose bit
  // is set in `blocks`; `row` is the tile's first row in the map, whose boxes have Share rows.
  template <int Share>
  CUKIT_DEVICE static void load_multicast(unsigned char* tile, const TensorMap* map, Mbarrier* full,
                                          int column, int row, int first, unsigned short blocks) {
    static_assert(Share % 8 == 0, "complete swizzle periods");
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      tma_load_2d_multicast(tile + part * kPartBytes + first * kRowBytes, map, full,
                            column + part * kPartColumns, row + first, blocks);
    }
  }

  // Stores the tile to (row, column) of a map; elements outside the tensor are dropped. Parts that
  // start outside are skipped.
  CUKIT_DEVICE static void store(const TensorMap* map, const unsigned char* tile, int column, int row,
                                 int columns) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = column + part * kPartColumns;
      if (first < columns) tma_store_2d(map, tile + part * kPartBytes, first, row);
    }
  }

  // The same to a map [matrices, rows, columns].
  CUKIT_DEVICE static void store(const TensorMap* map, const unsigned char* tile, int column,
                                 const MatrixRow& at, int columns) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = column + part * kPartColumns;
      if (first < columns) {
        tma_store_3d(map, tile + part * kPartBytes, first, at.row, at.matrix);
      }
    }
  }

  // ---- Ordinary accesses: ldmatrix, stmatrix, 16-byte loads ----

  // Address of a 16-byte chunk of a row; `shared` is the tile's address.
  CUKIT_DEVICE static unsigned address(unsigned shared, unsigned row, unsigned chunk) {
    constexpr unsigned kChunks = kRowBytes / 16;
    const unsigned within = (chunk % kChunks) ^ (row * kRowBytes / 128 % kChunks);
    return shared + chunk / kChunks * kPartBytes + row * kRowBytes + within * 16;
  }

  // ---- wgmma operands ----

  // K-major: k runs along the columns. Operand a: rows are m; operand b: rows are n.
  CUKIT_DEVICE static unsigned long long k_major(const unsigned char* tile) {
    constexpr int kLeading = Swizzle == OperandSwizzle::None ? kPartBytes : 16;
    return matrix_descriptor(tile, Swizzle, kLeading, 8 * kRowBytes);
  }

  // MN-major (transposed): k runs along the rows, m or n along the columns. 16-bit elements only.
  CUKIT_DEVICE static unsigned long long mn_major(const unsigned char* tile) {
    static_assert(sizeof(T) == 2, "wgmma transposes 16-bit operands only");
    constexpr bool kPlain = Swizzle == OperandSwizzle::None;
    return matrix_descriptor(tile, Swizzle, kPlain ? 8 * kRowBytes : kPartBytes,
                             kPlain ? kPartBytes : 8 * kRowBytes);
  }

  // Descriptor offsets, in units of 16 bytes.
  static constexpr int kStage = kBytes / 16;                       // to the next tile
  static constexpr int kPart = kPartBytes / 16;                    // to the next part
  static constexpr int rows(int count) { return count * (kRowBytes / 16); }  // multiples of eight
  // To the step-th 32 bytes of k. K-major: along a row; MN-major: 32 bytes of k are 32 / sizeof(T)
  // rows.
  static constexpr int k_step(int step) {
    return (step * 32 / kRowBytes * kPartBytes + step * 32 % kRowBytes) / 16;
  }
  static constexpr int mn_step(int step) { return rows(step * (32 / static_cast<int>(sizeof(T)))); }
  static constexpr int kSteps = Columns * static_cast<int>(sizeof(T)) / 32;  // K-major
  static constexpr int kRowSteps = Rows * static_cast<int>(sizeof(T)) / 32;  // MN-major
};

}  // namespace cukit
