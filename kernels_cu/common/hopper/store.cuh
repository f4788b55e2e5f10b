// Epilogues: a warpgroup's accumulators on their way from registers to global memory (sm_90).
//
// Accumulators lie as wgmma leaves them: element 4 n + 2 half + i of a lane is row
// accumulator_row() + 8 half, column 8 n + accumulator_column() + i.
//
//   write_rows   straight from registers, 64 bytes of a row at a time: no shared memory, no barrier.
//                For warpgroups that end at different times (attention).
//   StagedStore  through swizzled shared memory (stmatrix) and TMA: whole cache lines, the copy runs
//                in the background. For tiles of a matrix.
//   TransposedStore  the same for accumulators whose 64 rows are columns of the matrix.
#pragma once

#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/quad.cuh"

namespace cukit {

// A lane's two rows, 8 apart: what they are multiplied with, and where they go.
template <typename T>
struct ResultRows {
  float factor[2];
  bool exists[2];
  T* first;  // the first row's
  long long row_stride;
  int columns;
};

// Guarded: chunks of 32 columns reach beyond the last one.
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

namespace detail {

// One piece on its way through a buffer of the warpgroup's shared memory: `write` fills the buffer, by
// all threads, `store` starts the copy, in one thread.
template <int Buffers, typename Write, typename Store>
CUKIT_DEVICE void stage_piece(int barrier, const Write& write, const Store& store) {
  const bool starts = threadIdx.x % kWarpgroupThreads == 0;
  if (starts) bulk_wait_read<Buffers - 1>();
  named_sync(barrier, kWarpgroupThreads);  // the buffer is free
  write();
  fence_proxy_async();
  named_sync(barrier, kWarpgroupThreads);  // the buffer is written
  if (starts) {
    store();
    bulk_commit();  // an empty group counts as one
  }
}

}  // namespace detail

// Stores 64 x Columns accumulators in pieces of 64 x PieceColumns, through `Buffers` buffers of shared
// memory that belong to the warpgroup: while TMA reads one, the next piece is written to another.
template <typename T, int Columns, int PieceColumns, int Buffers>
struct StagedStore {
  using Piece = SharedTile<T, kWarpgroupRows, PieceColumns>;  // the boxes of the tensor map
  static constexpr int kPieces = Columns / PieceColumns;
  static constexpr int kBytes = Buffers * Piece::kBytes;

  static_assert(Columns % PieceColumns == 0 && PieceColumns % 16 == 0, "whole pieces of stmatrix");
  static_assert(kPieces % Buffers == 0, "every tile begins with the first buffer");

  // All threads of the warpgroup, with a named barrier of its own. The tile begins at (row, column) of
  // a matrix of `rows` x `columns`; what lies outside is not written.
  CUKIT_DEVICE static void store(const float (&sums)[Columns / 2], unsigned char* buffers,
                                 const TensorMap* map, int column, int row, int columns, int rows,
                                 int barrier) {
    const int lane = threadIdx.x % kWarpSize;
    const int own_row = threadIdx.x % kWarpgroupThreads / kWarpSize * 16 + lane % 16;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      unsigned char* const buffer = buffers + piece % Buffers * Piece::kBytes;
      detail::stage_piece<Buffers>(
          barrier,
          [&] {
#pragma unroll
            for (int pair = 0; pair < PieceColumns / 16; ++pair) {
              const float* d = &sums[piece * PieceColumns / 2 + 8 * pair];
              const unsigned packed[4] = {pack<T>(d[0], d[1]), pack<T>(d[2], d[3]),
                                          pack<T>(d[4], d[5]), pack<T>(d[6], d[7])};
              stmatrix_x4(Piece::address(shared_address(buffer), own_row, 2 * pair + lane / 16),
                          packed);
            }
          },
          [&] {
            if (row < rows) {
              Piece::store(map, buffer, column + piece * PieceColumns, row, columns);
            }
          });
    }
  }

  // Before the block exits: TMA has read the last buffers.
  CUKIT_DEVICE static void finish() {
    if (threadIdx.x % kWarpgroupThreads == 0) bulk_wait_read<0>();
  }
};

// Stores 64 x Rows accumulators of the transposed matrix in pieces of PieceRows x 64.
template <typename T, int Rows, int PieceRows, int Buffers>
struct TransposedStore {
  using Piece = SharedTile<T, PieceRows, kWarpgroupRows>;  // the boxes of the tensor map
  static constexpr int kPieces = Rows / PieceRows;
  static constexpr int kBytes = Buffers * Piece::kBytes;

  static_assert(Rows % PieceRows == 0 && PieceRows % 16 == 0, "whole pieces of stmatrix");
  static_assert(kPieces % Buffers == 0, "every tile begins with the first buffer");

  // As StagedStore::store.
  CUKIT_DEVICE static void store(const float (&sums)[Rows / 2], unsigned char* buffers,
                                 const TensorMap* map, int column, int row, int columns, int rows,
                                 int barrier) {
    const int lane = threadIdx.x % kWarpSize;
    const int own_row = lane % 8 + lane / 16 * 8;
    const int own_chunk = threadIdx.x % kWarpgroupThreads / kWarpSize * 2 + lane / 8 % 2;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      unsigned char* const buffer = buffers + piece % Buffers * Piece::kBytes;
      detail::stage_piece<Buffers>(
          barrier,
          [&] {
#pragma unroll
            for (int pair = 0; pair < PieceRows / 16; ++pair) {
              const float* d = &sums[piece * PieceRows / 2 + 8 * pair];
              const unsigned packed[4] = {pack<T>(d[0], d[1]), pack<T>(d[2], d[3]),
                                          pack<T>(d[4], d[5]), pack<T>(d[6], d[7])};
              stmatrix_x4_trans(
                  Piece::address(shared_address(buffer), 16 * pair + own_row, own_chunk), packed);
            }
          },
          [&] {
            const int first = row + piece * PieceRows;
            if (first < rows) Piece::store(map, buffer, column, first, columns);
          });
    }
  }

  // Before the block exits: TMA has read the last buffers.
  CUKIT_DEVICE static void finish() {
    if (threadIdx.x % kWarpgroupThreads == 0) bulk_wait_read<0>();
  }
};

}  // namespace cukit
