// Scales and codes of blocks of a matrix, in one pass over the values: rows (tokens, output
// channels), groups of a row (32, 64, 128), tiles (128x128).
//
// Equations and rounding: common/quant/scales.cuh. clip="mse" clips the range of a block to the one
// of CANDIDATES fractions that has the least sum of squared errors.
// Formats: common/quant/codes.cuh. Tiles and 1x128 groups as in DeepSeek-V3, arXiv:2412.19437.
// Mapping: a team of TEAM adjacent threads processes BLOCKS_PER_TEAM blocks of values; a thread
//   block has THREADS / TEAM teams. A thread holds ITEMS vectors of 16 bytes of each block of
//   values, TEAM vectors apart, all loaded before the first is used. IN_REGISTERS 0: blocks that do
//   not fit into the registers of a team are processed in parts and read again, from L2, for every
//   sweep.
// Shared memory: static; if TEAM is THREADS, THREADS / 32 words, with CANDIDATES above 1 twice
// that.
// Macros: those of common/quant/scales.cuh and quantization/access.cuh; BLOCK_ROWS, BLOCK_COLS:
//   extents of a block, 0 for any; FLAT 0|1: blocks divide the rows evenly, with no padding bytes
//   in the codes; THREADS; TEAM a power of two up to 32, or THREADS; BLOCKS_PER_TEAM up to TEAM, 1
//   if TEAM is THREADS or CANDIDATES is above 1; ITEMS; IN_REGISTERS 0|1; CANDIDATES 1, or more for
//   integer formats.
// Minimum architecture: sm_80 (float8 rounding is done in software before sm_89). Deterministic.
// Reference: cukit/reference/quantize.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/quant/scales.cuh"
#include "common/types.cuh"
#include "quantization/access.cuh"
#include "quantization/parameters.cuh"

namespace {

using cukit::Extremes;
using cukit::Factors;
using cukit::kValues;
using T = cukit::element_t;

// A block that fits into registers is indexed with 32 bits.
template <bool InRegisters>
struct ExtentOf { using type = int; };
template <>
struct ExtentOf<false> { using type = long long; };
using Extent = ExtentOf<IN_REGISTERS>::type;

constexpr int kTeams = THREADS / TEAM;
constexpr bool kWarpTeams = TEAM <= cukit::kWarpSize;
constexpr float kClipStep = 1.0f / 32;  // CLIP_STEP of the reference

// Reduces over the threads of a team, which all receive the result. Every thread of the thread
// block must call it.
template <typename Op, typename Number>
CUKIT_DEVICE Number team_reduce(Number value, Number* scratch) {
  if constexpr (kWarpTeams) {
    return cukit::warp_reduce<Op, TEAM>(value);
  } else {
    return cukit::block_reduce<Op, THREADS>(value, scratch);
  }
}

// The position of a block of values: its matrix, block row and block column.
struct Place {
  long long matrix, down, across;

  CUKIT_DEVICE Place(const cukit::BlockedMatrices& at, long long id) {
    // 32 bits, because a 64-bit division takes about a hundred instructions.
    const unsigned blocks_across = static_cast<unsigned>(at.blocks_across);
    const unsigned blocks_down = static_cast<unsigned>(at.blocks_down);
    const unsigned row_of_blocks = static_cast<unsigned>(id) / blocks_across;
    // Blocks of one row: the plan joins all matrices into one.
    matrix = BLOCK_ROWS == 1 ? 0 : row_of_blocks / blocks_down;
    down = row_of_blocks - matrix * blocks_down;
    across = static_cast<unsigned>(id) - row_of_blocks * blocks_across;
  }
};

// A block of values: its location, and the vectors that this thread holds.
class Block {
 public:
  Block() = default;

  CUKIT_DEVICE Block(const cukit::BlockedMatrices& at, long long id, int lane) : lane_(lane) {
    const bool exists = id < at.num_blocks;
    const long long block_rows = BLOCK_ROWS ? BLOCK_ROWS : at.block_rows;
    const Extent block_cols = BLOCK_COLS ? BLOCK_COLS : static_cast<Extent>(at.block_cols);
    items_across_ = (block_cols + kValues - 1) / kValues;
    if constexpr (FLAT) {
      first_value_ = id * block_cols;
      first_byte_ = first_value_ / cukit::kCodesPerByte;
      width_ = block_cols;
      rows_ = exists;
    } else {
      const Place place(at, id);
      const long long first_row = place.matrix * at.rows + place.down * block_rows;
      const long long first_col = place.across * static_cast<long long>(block_cols);
      first_value_ = first_row * at.cols + first_col;
      first_byte_ = first_row * at.storage_cols + first_col / cukit::kCodesPerByte;
      width_ = static_cast<Extent>(min(static_cast<long long>(block_cols), at.cols - first_col));
      const long long rows_left = at.rows - place.down * block_rows;
      rows_ = exists ? static_cast<Extent>(min(block_rows, rows_left)) : 0;
    }
  }

  CUKIT_DEVICE void load(const T* x, const cukit::BlockedMatrices& at) {
    if constexpr (IN_REGISTERS) load_part(x, at, lane_);
  }

  // Calls f(values, item) for every vector of this thread.
  template <typename F>
  CUKIT_DEVICE void sweep(const T* x, const cukit::BlockedMatrices& at, F f) {
    if constexpr (IN_REGISTERS) {
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) f(values_[j], lane_ + j * TEAM);
    } else {
      const Extent items = rows_ * items_across_;
      for (Extent first = lane_; first < items; first += TEAM * ITEMS) {
        load_part(x, at, first);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) f(values_[j], first + j * TEAM);
      }
    }
  }

  CUKIT_DEVICE void store_codes(unsigned char* storage, const cukit::BlockedMatrices& at,
                                const cukit::Codes& codes, Extent item) const {
    const Vector vector = vector_of(item);
    storage += first_byte_ + vector.row * at.storage_cols + vector.col / cukit::kCodesPerByte;
    cukit::store_codes(storage, codes, vector.count);
  }

 private:
  // A vector of the block; `count` of its values exist, none if `count` is not positive.
  struct Vector {
    Extent row, col, count;
  };

  CUKIT_DEVICE Vector vector_of(Extent item) const {
    const Extent across = BLOCK_COLS ? (BLOCK_COLS + kValues - 1) / kValues : items_across_;
    const Extent row = BLOCK_ROWS == 1 ? 0 : item / across;
    const Extent col = (item - row * across) * kValues;
    return {row, col, row < rows_ ? width_ - col : 0};
  }

  CUKIT_DEVICE void load_part(const T* x, const cukit::BlockedMatrices& at, Extent first) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const Vector vector = vector_of(first + j * TEAM);
      const long long index = first_value_ + vector.row * at.cols + vector.col;
      values_[j] = cukit::load_values(x + index, vector.count);
    }
  }

  cukit::Values values_[ITEMS];
  long long first_value_, first_byte_;
  Extent rows_, width_, items_across_;
  int lane_;
};

// The fraction of the range with the least error, for a team; every thread of the thread block must
// call it.
CUKIT_DEVICE float best_part(Block& block, const Extremes& extremes, const T* x,
                             const cukit::BlockedMatrices& at, float* scratch) {
  float least = cukit::infinity();
  float best = 1.0f;
  for (int candidate = 0; candidate < CANDIDATES; ++candidate) {
    const float part = 1.0f - candidate * kClipStep;
    const Factors clipped = cukit::factors_of(extremes, part);
    float error = 0.0f;
    block.sweep(x, at, [&](const cukit::Values& values, Extent) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        error += cukit::squared_error(clipped, cukit::to_float(values[i]));
      }
    });
    error = team_reduce<cukit::Sum>(error, scratch);
    if (error < least) least = error, best = part;
  }
  return best;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) quantize_blocks(
    const T* __restrict__ x,                 // [num_matrices, rows, cols]
    unsigned char* __restrict__ storage,     // [num_matrices, rows, storage_cols]
    cukit::scale_t* __restrict__ scales,     // [num_matrices, blocks_down, blocks_across], any strides
    signed char* __restrict__ zero_points,   // like scales but contiguous; null without ZERO_POINTS
    const __grid_constant__ cukit::BlockedMatrices matrices) {
  __shared__ int bits_scratch[kWarpTeams ? 1 : THREADS / cukit::kWarpSize];
  __shared__ float error_scratch[kWarpTeams ? 1 : THREADS / cukit::kWarpSize];
  const int lane = threadIdx.x % TEAM;
  const long long first =
      static_cast<long long>(blockIdx.x) * (BLOCKS_PER_TEAM * kTeams) + threadIdx.x / TEAM;

  Block blocks[BLOCKS_PER_TEAM];
#pragma unroll
  for (int u = 0; u < BLOCKS_PER_TEAM; ++u) {
    blocks[u] = Block(matrices, first + u * kTeams, lane);
    blocks[u].load(x, matrices);
  }
  // Thread u of a team computes the factors of the team's block u; the others read them by
  // shuffles.
  const int own = lane % BLOCKS_PER_TEAM;
  Extremes own_extremes;
#pragma unroll
  for (int u = 0; u < BLOCKS_PER_TEAM; ++u) {
    Extremes extremes;
    blocks[u].sweep(x, matrices, [&](const cukit::Values& values, Extent) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) extremes.take(cukit::to_float(values[i]));
    });
#pragma unroll
    for (int i = 0; i < Extremes::kCount; ++i) {
      const int most = team_reduce<cukit::MaxBits>(extremes.bits[i], bits_scratch);
      if (u == own) own_extremes.bits[i] = most;
    }
  }
  float part = 1.0f;
  if constexpr (CANDIDATES > 1) {
    part = best_part(blocks[0], own_extremes, x, matrices, error_scratch);
  }
  const Factors factors = cukit::factors_of(own_extremes, part);
  const long long id = first + own * kTeams;
  if (lane < BLOCKS_PER_TEAM && id < matrices.num_blocks) {
    const Place place(matrices, id);
    scales[place.matrix * matrices.scale_matrix + place.down * matrices.scale_down +
           place.across * matrices.scale_across] = factors.scale;
    if constexpr (ZERO_POINTS) zero_points[id] = static_cast<signed char>(factors.inverse.zero_point);
  }
#pragma unroll
  for (int u = 0; u < BLOCKS_PER_TEAM; ++u) {
    cukit::Inverse inverse = factors.inverse;
    if constexpr (BLOCKS_PER_TEAM > 1) {
      inverse.scale = __shfl_sync(cukit::kFullMask, inverse.scale, u, TEAM);
      if constexpr (ZERO_POINTS) {
        inverse.zero_point = __shfl_sync(cukit::kFullMask, inverse.zero_point, u, TEAM);
      }
    }
    blocks[u].sweep(x, matrices, [&](const cukit::Values& values, Extent item) {
      float scaled[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) scaled[i] = inverse.scaled(cukit::to_float(values[i]));
      blocks[u].store_codes(storage, matrices, cukit::encode_values(scaled, inverse.finite()), item);
    });
  }
}
