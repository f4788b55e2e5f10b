// Loads the rows of two tensors, pass by pass, into registers.
//
// Macros: those of rows.cuh; PREFETCH 1: asynchronous copies (cp.async) prefetch the next pass into
//   shared memory, 4 * ROWS * VECS_PER_THREAD * THREADS vectors of 16 bytes; each thread copies
//   only the vectors that it reads, so no barrier is needed. PREFETCH 0: plain loads. FULL 1: rows
//   have LANES * VECS_PER_THREAD * VEC elements, so no vector of a thread is outside its row.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/types.cuh"
#include "layers/rows.cuh"

namespace cukit {

// The row length; with FULL a constant, so that the compiler drops the column bounds checks.
CUKIT_DEVICE constexpr int row_length(int cols) { return FULL ? kMaxColumns : cols; }

class RowFeed {
 public:
  using T = element_t;
  using Vector = Vec<T, VEC>;
  using Rows = Vector[ROWS][VECS_PER_THREAD];

  // `slots`: dynamic shared memory. Passes start at rows `first_row`, `first_row + stride`, ...
  CUKIT_DEVICE RowFeed(const T* first, const T* second, int rows, int cols, long long first_row,
                       long long stride, Vector* slots)
      : tensors_{first, second}, rows_(rows), cols_(cols), stride_(stride), slots_(slots + threadIdx.x) {
    if constexpr (PREFETCH) copy(first_row);
  }

  CUKIT_DEVICE bool holds(long long row, int vec) const { return row < rows_ && vec < cols_ / VEC; }

  // Loads the rows of the pass at `first_row`. Must be called once per pass, in order.
  CUKIT_DEVICE void take(Rows& first, Rows& second, long long first_row) {
    if constexpr (PREFETCH) {
      // Prefetch into the buffer that the previous pass has read.
      half_ ^= 1;
      copy(first_row + stride_);
      cp_async_wait<1>();
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const long long row = share_.row(first_row, r);
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        if constexpr (PREFETCH) {
          first[r][i] = *slot(half_ ^ 1, 0, r, i);
          second[r][i] = *slot(half_ ^ 1, 1, r, i);
        } else if (holds(row, share_.vec(i))) {
          const long long at = row * cols_ + share_.vec(i) * VEC;
          load<Cache::Kept>(first[r][i], tensors_[0] + at);
          load<Cache::Kept>(second[r][i], tensors_[1] + at);
        }
      }
    }
  }

 private:
  CUKIT_DEVICE Vector* slot(int half, int tensor, int r, int i) const {
    return slots_ + (((half * 2 + tensor) * ROWS + r) * VECS_PER_THREAD + i) * THREADS;
  }

  CUKIT_DEVICE void copy(long long first_row) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const long long row = share_.row(first_row, r);
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        const bool valid = holds(row, share_.vec(i));
        const long long at = row * cols_ + share_.vec(i) * VEC;
#pragma unroll
        for (int tensor = 0; tensor < 2; ++tensor) {
          cp_async_16(shared_address(slot(half_, tensor, r, i)), tensors_[tensor] + at, valid);
        }
      }
    }
    cp_async_commit();
  }

  const T* tensors_[2];
  int rows_, cols_;
  long long stride_;
  Vector* slots_;
  int half_ = 0;  // destination of the last copy
  RowShare share_;
};

}  // namespace cukit
