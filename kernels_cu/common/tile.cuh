// Tiles of 16-bit elements in shared memory, and the tensor-core operands read from them.
//
// A tile has Rows rows of Cols elements (Cols a multiple of 32), stored in 16-byte chunks of eight
// elements. Chunk c of row r is stored at position c ^ phase(r): the eight rows that one ldmatrix
// phase reads are then in eight different bank groups. phase(r) is r % 8 for rows of 128 n bytes,
// and (r / 2) % 4 for rows of 64 n bytes (n odd), which already alternate between the halves of the
// 128 bytes of all banks. The tile's base is 128-byte aligned.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit {

template <int Cols>
struct Swizzle {
  static_assert(Cols % 32 == 0, "rows are multiples of 64 bytes");
  static constexpr int kChunks = Cols / 8;
  static constexpr int kPitch = Cols * 2;  // bytes
  static constexpr int kMask = Cols % 64 == 0 ? 7 : 3;
  static constexpr int kRowShift = Cols % 64 == 0 ? 0 : 1;

  // Byte offset of a chunk.
  CUKIT_DEVICE static unsigned offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ ((row >> kRowShift) & kMask)) << 4);
  }

  // offset(row + rows, chunk + chunks), given `at` = offset(row, chunk), which may include the
  // tile's base. `rows` is a multiple of 8; the addition chunk + chunks has no carries.
  CUKIT_DEVICE static unsigned advance(unsigned at, int rows, int chunks) {
    return (at ^ ((chunks & kMask) << 4)) + rows * kPitch + ((chunks & ~kMask) << 4);
  }
};

// Order in which the lanes address the four 8x8 matrices of ldmatrix within a 16x16 block:
// ByRow:    matrices (rows 0-7, cols 0-7), (rows 8-15, cols 0-7), (rows 0-7, cols 8-15), the rest
// ByColumn: matrices (rows 0-7, cols 0-7), (rows 0-7, cols 8-15), (rows 8-15, cols 0-7), the rest
enum class LaneOrder { ByRow, ByColumn };

// An operand of a warp's product, read from a tile: 16x16 blocks starting at (row, column).
// `operator()(r, rows, cols, bytes)` loads the block `rows` further down and `cols` further right
// (multiples of 16, known at compile time) in the tile `bytes` after this one: tiles of one shape
// share an operand's address register.
//
//   left operand A (m x k):   A stored [m][k]: ByRow         A stored [k][m]: ByColumn, transposed
//   right operand B (k x n):  B stored [n][k]: ByColumn      B stored [k][n]: ByRow, transposed
//   (two neighbouring 16x8 B operands at a time: r[0] r[1] and r[2] r[3])
//
// A warp reads Span columns, the first one at a multiple of Span; Span is a power of two or Cols.
template <int Cols, int Span, LaneOrder Order, bool Transposed>
struct Operand {
  static_assert(Span == Cols || (Span & (Span - 1)) == 0, "columns are added without carries");
  unsigned address;

  CUKIT_DEVICE Operand(unsigned tile, int row, int column) {
    const int lane = threadIdx.x % kWarpSize;
    const int lane_row = Order == LaneOrder::ByRow ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int lane_chunk = Order == LaneOrder::ByRow ? lane / 16 : lane / 8 % 2;
    address = tile + Swizzle<Cols>::offset(row + lane_row, column / 8 + lane_chunk);
  }

  // The same operand with an opaque address: at the top of a loop this keeps the compiler from
  // computing addresses before the loop, which would take a register for each column step.
  CUKIT_DEVICE Operand rederived() const {
    Operand copy = *this;
    copy.address = opaque(address);
    return copy;
  }

  CUKIT_DEVICE void operator()(unsigned (&r)[4], int rows, int cols, int bytes = 0) const {
    const unsigned at = Swizzle<Cols>::advance(address, rows, cols / 8) + bytes;
    if constexpr (Transposed) {
      ldmatrix_x4_trans(r, at);
    } else {
      ldmatrix_x4(r, at);
    }
  }
};

// A[m][k]
template <int Cols, int Span = Cols>
using LeftMK = Operand<Cols, Span, LaneOrder::ByRow, false>;
// A[k][m]
template <int Cols, int Span = Cols>
using LeftKM = Operand<Cols, Span, LaneOrder::ByColumn, true>;
// B[n][k]
template <int Cols, int Span = Cols>
using RightNK = Operand<Cols, Span, LaneOrder::ByColumn, false>;
// B[k][n]
template <int Cols, int Span = Cols>
using RightKN = Operand<Cols, Span, LaneOrder::ByRow, true>;

// One warp's acc += A B: `acc` holds MT x NT tiles of 16x8, the inner extent is 16 * KT.
// left(r, m, k) and right(r, n, k) load the operands of row tile m, column tiles n and n + 1, and
// step k.
template <typename T, int KT, int MT, int NT, typename Left, typename Right>
CUKIT_DEVICE void warp_product(float (&acc)[MT][NT][4], Left left, Right right) {
  static_assert(NT % 2 == 0, "column tiles come in pairs");
#pragma unroll
  for (int k = 0; k < KT; ++k) {
    unsigned a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) left(a[m], m, k);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      unsigned b[4];
      right(b, n, k);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_16x8x16<T>(acc[m][n], a[m], b[0], b[1]);
        mma_16x8x16<T>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <int MT, int NT>
CUKIT_DEVICE void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

// Copies tiles from global to shared memory by cp.async. Called by all Threads threads of the
// block; the caller commits the group. Rows of the source are `row_stride` elements apart. Padded:
// the source may have fewer than Cols columns.
template <int Rows, int Cols, int Threads, bool Padded>
struct TileCopy {
  static constexpr int kChunks = Swizzle<Cols>::kChunks;
  static constexpr int kCopies = (Rows * kChunks + Threads - 1) / Threads;
  // With full rows per pass a thread's chunk and phase are constant: all its copies share one
  // offset.
  static constexpr int kRowsPerPass = Threads / kChunks;
  // At most 32 rows per pass, so that a thread's first offset fits in 32 bits.
  static constexpr bool kWholeRows =
      Threads % (8 * kChunks) == 0 && Rows % kRowsPerPass == 0 && kRowsPerPass <= 32;

  // Copies a tile; rows from `rows` on and, if Padded, columns from `cols` on become zeros and are
  // not read.
  template <typename T>
  CUKIT_DEVICE static void start(unsigned tile, const T* from, long long row_stride, int rows,
                                 int cols) {
    const int thread = threadIdx.x;
    if constexpr (kWholeRows) {
      const int row = thread / kChunks;
      const int chunk = thread % kChunks;
      const int offset = row * static_cast<int>(row_stride) + chunk * 8;
      const unsigned target = tile + Swizzle<Cols>::offset(row, chunk);
      const int rows_left = Padded && chunk * 8 >= cols ? 0 : rows - row;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        cp_async_16(target + i * kRowsPerPass * Swizzle<Cols>::kPitch,
                    from + i * kRowsPerPass * row_stride + offset, i * kRowsPerPass < rows_left);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int index = i * Threads + thread;
        const int row = index / kChunks;
        const int chunk = index % kChunks;
        if (Rows * kChunks % Threads == 0 || row < Rows) {
          cp_async_16(tile + Swizzle<Cols>::offset(row, chunk), from + row * row_stride + chunk * 8,
                      row < rows && (!Padded || chunk * 8 < cols));
        }
      }
    }
  }
};

// Stores Rows rows of a tile, from `first_row` on, to global memory, 16 bytes per access; rows from
// `rows` on and, if Padded, columns from `cols` on are skipped. Called by Threads threads, numbered
// by `thread`: a warp may store its own rows.
template <int Rows, int Cols, int Threads, bool Padded, typename T>
CUKIT_DEVICE void store_tile(T* to, long long row_stride, const unsigned char* tile, int first_row,
                             int rows, int cols, int thread) {
  constexpr int kChunks = Swizzle<Cols>::kChunks;
#pragma unroll
  for (int i = 0; i < (Rows * kChunks + Threads - 1) / Threads; ++i) {
    const int index = i * Threads + thread;
    if (Rows * kChunks % Threads != 0 && index >= Rows * kChunks) break;
    const int row = first_row + index / kChunks;
    const int chunk = index % kChunks;
    if (row < rows && (!Padded || chunk * 8 < cols)) {
      *reinterpret_cast<uint4*>(to + row * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + Swizzle<Cols>::offset(row, chunk));
    }
  }
}

}  // namespace cukit
