// Distribution of the rows of a normalisation over the threads of a block.
//
// LANES consecutive threads hold a row; lane t holds its vectors t, t + LANES, ...:
//   LANES == THREADS       one row per block: long rows, reduced through shared memory
//   LANES <= 32            THREADS / LANES rows per block in parallel: short rows, no barrier
// A thread processes ROWS rows at once, THREADS / LANES apart, so that the loads of several short
// rows are in flight together. A pass of a block covers kPassRows consecutive rows.
//
// Macros: THREADS multiple of 32, 32..1024; LANES: THREADS or a power of two up to 32; VEC elements
//   per access; VECS_PER_THREAD vectors per thread and row; ROWS.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

static_assert(LANES == THREADS || LANES <= kWarpSize, "a row is held by one warp or the block");

constexpr int kGroups = THREADS / LANES;
constexpr int kPassRows = kGroups * ROWS;
constexpr int kWarps = THREADS / kWarpSize;
constexpr bool kCrossWarp = LANES > kWarpSize;  // rows are reduced across warps
constexpr int kScratch = kCrossWarp ? kWarps : 1;  // floats of shared memory per sum

// The rows and columns of a thread.
struct RowShare {
  int group = threadIdx.x / LANES;
  int lane = threadIdx.x % LANES;

  // The r-th of this thread's rows in a pass that begins at `first_row`.
  CUKIT_DEVICE long long row(long long first_row, int r) const {
    return first_row + r * kGroups + group;
  }
  // The i-th of this thread's vectors in a row.
  CUKIT_DEVICE int vec(int i) const { return lane + i * LANES; }
};

// Replaces N values per thread by their sums over the row. `scratch` is N * kScratch floats of shared
// memory, which must not be written again before another barrier: alternate between two buffers.
template <int N>
CUKIT_DEVICE void row_sums(float (&values)[N], float* scratch) {
  constexpr int kLanes = kCrossWarp ? kWarpSize : LANES;
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = warp_reduce<Sum, kLanes>(values[n]);
  if constexpr (kCrossWarp) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) scratch[n * kWarps + threadIdx.x / kWarpSize] = values[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      values[n] = warp_reduce<Sum>(lane < kWarps ? scratch[n * kWarps + lane] : 0.0f);
    }
  }
}

// Keeps 16-bit elements packed in registers across the row sums. Without it the compiler keeps the
// unpacked floats live until their second use, which takes twice the registers.
template <typename T>
CUKIT_DEVICE void stay_packed(Vec<T, VEC> (&rows)[ROWS][VECS_PER_THREAD]) {
  if constexpr (sizeof(T) < 4 && sizeof(rows[0][0]) >= 4) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        unsigned* words = reinterpret_cast<unsigned*>(&rows[r][i]);
#pragma unroll
        for (int w = 0; w < static_cast<int>(sizeof(rows[0][0]) / 4); ++w) words[w] = opaque(words[w]);
      }
    }
  }
}

// The weights of this thread's columns in a kernel with many passes: in registers for short rows, else
// reloaded in every pass, from L1, to save registers.
template <typename T>
class PassWeights {
 public:
  CUKIT_DEVICE PassWeights(const T* weight, int num_vecs) : weight_(weight) {
    if constexpr (!kCrossWarp) {
#pragma unroll
      for (int i = 0; i < VECS_PER_THREAD; ++i) {
        if (share_.vec(i) < num_vecs) load(held_[i], weight + share_.vec(i) * VEC);
      }
    }
  }

  // The weights of the i-th vector, which must be within the row.
  CUKIT_DEVICE Vec<T, VEC> operator()(int i) const {
    if constexpr (!kCrossWarp) return held_[i];
    Vec<T, VEC> read;
    load(read, weight_ + opaque(share_.vec(i) * VEC));
    return read;
  }

 private:
  const T* weight_;
  Vec<T, VEC> held_[VECS_PER_THREAD];
  RowShare share_;
};

// Writes a block's partial column gradient, summed over its groups in a fixed order, to `into` [cols].
// `sums` holds the sums of this thread's vectors; `scratch` is kColumnScratch floats of shared memory.
// All threads of the block must call it.
constexpr int kMaxColumns = LANES * VECS_PER_THREAD * VEC;
constexpr int kColumnScratch = kGroups > 1 ? kWarps * kMaxColumns : 1;

CUKIT_DEVICE void write_column_sums(const float (&sums)[VECS_PER_THREAD][VEC], float* into, int cols,
                                    float* scratch) {
  const RowShare share;
  const int num_vecs = cols / VEC;
  if constexpr (kGroups == 1) {
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      if (share.vec(i) >= num_vecs) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) into[share.vec(i) * VEC + j] = sums[i][j];
    }
  } else {
    float* own = scratch + threadIdx.x / kWarpSize * kMaxColumns;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float sum = sums[i][j];
#pragma unroll
        for (int offset = LANES; offset < kWarpSize; offset *= 2) {
          sum += __shfl_xor_sync(kFullMask, sum, offset);
        }
        if (threadIdx.x % kWarpSize < LANES) own[share.vec(i) * VEC + j] = sum;
      }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < cols; column += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += scratch[warp * kMaxColumns + column];
      into[column] = sum;
    }
  }
}

}  // namespace cukit
