// Epilogue stores: a warpgroup's accumulators from registers to global memory (sm_90).
//
// wgmma accumulators: element 4 n + 2 half + i of a lane is row
// accumulator_row() + 8 half, column 8 n + accumulator_column() + i.
//
//   write_rows   straight from registers, 64 bytes of a row at a time, without shared memory or
//                barriers: for warpgroups that finish at different times (attention).
//   StagedStore  through swizzled shared memory (stmatrix) and TMA: full cache lines, asynchronous.
//                For tiles of a matrix. TransposedStore: the same for the transpose of the tile.
//   write_pairs  from registers, two elements at a time: for a few columns.
#pragma once

#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/quad.cuh"
#include "common/types.cuh"

namespace cukit {

// Factors and destination of a lane's two rows, 8 apart.
template <typename T>
struct ResultRows {
  float factor[2];
  bool exists[2];
  T* first;  // start of the first row
  long long row_stride;
  int columns;
};

// Multiplies 2 N columns of a warpgroup's 64 rows by their factors and stores them. Guarded: the
// last chunk of 32 columns may extend beyond the last column.
template <bool Guarded, typename T, int N>
CUKIT_DEVICE void write_rows(const float (&sums)[N], const ResultRows<T>& rows) {
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* const out = rows.first + 8 * half * rows.row_stride;
#pragma unroll
    for (int four = 0; four < (N + 15) / 16; ++four) {
      unsigned chunk[4] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (4 * four + n < N / 4) {
          const float* pair = &sums[4 * (4 * four + n) + 2 * half];
          chunk[n] = pack<T>(pair[0] * rows.factor[half], pair[1] * rows.factor[half]);
        }
      }
      transpose_quad(chunk);
      const int column = 32 * four + 8 * quad_lane;
      if (rows.exists[half] && (!Guarded || column < rows.columns)) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

// The swizzle for rows of `bytes` bytes.
constexpr OperandSwizzle row_swizzle(int bytes) {
  return bytes == 128 ? OperandSwizzle::Bytes128
         : bytes == 64 ? OperandSwizzle::Bytes64
                       : OperandSwizzle::Bytes32;
}

// Stores 64 x Columns accumulators in pieces of 64 x PieceColumns, through `Buffers` shared-memory
// buffers per warpgroup: while TMA reads one, the next piece is written to another.
template <typename T, int Columns, int PieceColumns, int Buffers>
struct StagedStore {
  using Piece = SharedTile<T, kWarpgroupRows, PieceColumns,  // the boxes of the tensor map
                           row_swizzle(PieceColumns * static_cast<int>(sizeof(T)))>;
  static constexpr int kPieces = Columns / PieceColumns;
  static constexpr int kBytes = Buffers * Piece::kBytes;

  // Called by all threads of the warpgroup; `barrier`: a named barrier that no other warpgroup
  // uses. The tile starts at (row, column) of a matrix of `rows` x `columns`; elements outside are
  // not written. First: index of the first accumulator.
  template <int First = 0, int N>
  CUKIT_DEVICE static void store(const float (&sums)[N], unsigned char* buffers,
                                 const TensorMap* map, int column, int row, int columns, int rows,
                                 int barrier) {
    store_pieces<First>(sums, buffers, barrier, [&](int piece, const unsigned char* buffer) {
      if (row < rows) Piece::store(map, buffer, column + piece * PieceColumns, row, columns);
    });
  }

  // The same with a destination per piece: one thread calls start(piece, buffer), which issues the
  // copy of that piece, or none.
  template <int First = 0, int N, typename Start>
  CUKIT_DEVICE static void store_pieces(const float (&sums)[N], unsigned char* buffers, int barrier,
                                        const Start& start) {
    static_assert(Columns % PieceColumns == 0 && PieceColumns % 16 == 0,
                  "pieces of full stmatrix blocks");
    static_assert(First + Columns / 2 <= N, "the accumulators exist");
    const bool starts = threadIdx.x % kWarpgroupThreads == 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      unsigned char* const buffer = buffers + piece % Buffers * Piece::kBytes;
      if (starts) {
        // A new tile starts with the first buffer; TMA has normally read the previous tile by now.
        if (piece == 0) bulk_wait_read<0>();
        if (piece >= Buffers) bulk_wait_read<Buffers - 1>();
      }
      named_sync(barrier, kWarpgroupThreads);  // the buffer is free
      write(&sums[First + piece * PieceColumns / 2], buffer);
      fence_proxy_async();
      named_sync(barrier, kWarpgroupThreads);  // the buffer is written
      if (starts) {
        start(piece, buffer);
        bulk_commit();  // also for an empty group
      }
    }
  }

  // The same in steps, for pieces that are computed one by one: for every `Buffers` pieces call
  // acquire(), write() for each piece, then send().
  CUKIT_DEVICE static void acquire(int barrier) {
    if (threadIdx.x % kWarpgroupThreads == 0) bulk_wait_read<0>();
    named_sync(barrier, kWarpgroupThreads);  // the buffers are free
  }

  // Writes `Count` columns, from column `first` of a piece on.
  template <int Count = PieceColumns>
  CUKIT_DEVICE static void write(const float* sums, unsigned char* buffer, int first = 0) {
    const int lane = threadIdx.x % kWarpSize;
    const int own_row = threadIdx.x % kWarpgroupThreads / kWarpSize * 16 + lane % 16;
#pragma unroll
    for (int pair = 0; pair < Count / 16; ++pair) {
      const float* d = &sums[8 * pair];
      const unsigned packed[4] = {pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]),
                                  pack<T>(d[6], d[7])};
      const int chunk = first / 8 + 2 * pair + lane / 16;
      stmatrix_x4(Piece::address(shared_address(buffer), own_row, chunk), packed);
    }
  }

  // One thread calls start(i, buffer) for each of `count` pieces, as store_pieces does.
  template <typename Start>
  CUKIT_DEVICE static void send(int count, unsigned char* buffers, int barrier, const Start& start) {
    fence_proxy_async();
    named_sync(barrier, kWarpgroupThreads);  // the buffers are written
    if (threadIdx.x % kWarpgroupThreads == 0) {
      for (int i = 0; i < count; ++i) start(i, buffers + i * Piece::kBytes);
      bulk_commit();
    }
  }

  // As store(), for a part of a piece: PartColumns columns from column `first` of the tile on,
  // which is column `column` of the matrix. Parts must come in order; the last part of a piece
  // issues its copy.
  template <int PartColumns>
  CUKIT_DEVICE static void store_part(const float (&sums)[PartColumns / 2], unsigned char* buffers,
                                      const TensorMap* map, int column, int row, int columns,
                                      int rows, int barrier, int first) {
    static_assert(PieceColumns % PartColumns == 0 && Buffers == 2, "two buffers of full parts");
    const int piece = first / PieceColumns;
    const int within = first % PieceColumns;
    const bool starts = threadIdx.x % kWarpgroupThreads == 0;
    unsigned char* const buffer = buffers + piece % Buffers * Piece::kBytes;
    if (within == 0) {
      if (starts && piece == 0) bulk_wait_read<0>();
      if (starts && piece >= Buffers) bulk_wait_read<Buffers - 1>();
      named_sync(barrier, kWarpgroupThreads);  // the buffer is free
    }
    write<PartColumns>(sums, buffer, within);
    if (within + PartColumns == PieceColumns) {
      fence_proxy_async();
      named_sync(barrier, kWarpgroupThreads);  // the buffer is written
      if (starts) {
        if (row < rows) Piece::store(map, buffer, column - within, row, columns);
        bulk_commit();
      }
    }
  }

  // Call before the block exits: waits until TMA has read the last buffers.
  CUKIT_DEVICE static void finish() {
    if (threadIdx.x % kWarpgroupThreads == 0) bulk_wait_read<0>();
  }
};

// Stores the transpose of 64 x Columns accumulators, Columns rows of 64, in pieces of PieceColumns
// rows through one buffer per warpgroup.
template <typename T, int Columns, int PieceColumns = Columns>
struct TransposedStore {
  using Piece = SharedTile<T, PieceColumns, kWarpgroupRows>;  // the box of the tensor map
  static constexpr int kBytes = Piece::kBytes;

  static_assert(sizeof(T) == 2 && PieceColumns % 16 == 0, "full stmatrix blocks");
  static_assert(Columns % PieceColumns == 0, "full pieces");

  // As StagedStore::store; (row, column), `rows` and `columns` are of the transpose.
  template <int N>
  CUKIT_DEVICE static void store(const float (&sums)[N], unsigned char* buffer,
                                 const TensorMap* map, int column, int row, int columns, int rows,
                                 int barrier) {
    static_assert(Columns / 2 <= N, "the accumulators exist");
#pragma unroll
    for (int first = 0; first < Columns; first += PieceColumns) {
      store_piece(&sums[first / 2], buffer, barrier, [&] {
        if (row + first < rows) Piece::store(map, buffer, column, row + first, columns);
      });
    }
  }

  // One piece with its own destination: one thread calls send(), which issues the copy of the
  // buffer.
  template <typename Send>
  CUKIT_DEVICE static void store_piece(const float* sums, unsigned char* buffer, int barrier,
                                       const Send& send) {
    const int lane = threadIdx.x % kWarpSize;
    const int own_row = lane / 16 * 8 + lane % 8;
    const int own_chunk = threadIdx.x % kWarpgroupThreads / kWarpSize * 2 + lane / 8 % 2;
    const bool starts = threadIdx.x % kWarpgroupThreads == 0;
    if (starts) bulk_wait_read<0>();
    named_sync(barrier, kWarpgroupThreads);  // the buffer is free
#pragma unroll
    for (int pair = 0; pair < PieceColumns / 16; ++pair) {
      const float* d = &sums[8 * pair];
      const unsigned packed[4] = {pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]),
                                  pack<T>(d[6], d[7])};
      stmatrix_x4_trans(Piece::address(shared_address(buffer), 16 * pair + own_row, own_chunk),
                        packed);
    }
    fence_proxy_async();
    named_sync(barrier, kWarpgroupThreads);  // the buffer is written
    if (starts) {
      send();
      bulk_commit();
    }
  }

  CUKIT_DEVICE static void finish() {
    if (threadIdx.x % kWarpgroupThreads == 0) bulk_wait_read<0>();
  }
};

// Writes accumulators First .. First + Columns / 2 - 1 of each lane: 64 rows x Columns columns from
// (row, column) of a matrix of `rows` x `columns` on. `columns` and `stride` are even unless
// Transposed, where element (i, j) goes to out[j * stride + i].
template <bool Transposed, int Columns, int First = 0, typename T, int N>
CUKIT_DEVICE void write_pairs(const float (&sums)[N], T* out, long long stride, int row, int column,
                              int rows, int columns) {
  static_assert(sizeof(T) == 2 && First + Columns / 2 <= N, "16-bit elements that exist");
#pragma unroll
  for (int n = 0; n < Columns / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* pair = &sums[First + 4 * n + 2 * half];
      const int i = row + accumulator_row() + 8 * half;
      const int j = column + 8 * n + accumulator_column();
      if constexpr (Transposed) {
        if (i < rows && j < columns) out[j * stride + i] = from_float<T>(pair[0]);
        if (i < rows && j + 1 < columns) out[(j + 1) * stride + i] = from_float<T>(pair[1]);
      } else if (i < rows && j < columns) {
        *reinterpret_cast<unsigned*>(out + i * stride + j) = pack<T>(pair[0], pair[1]);
      }
    }
}

}  // namespace cukit
