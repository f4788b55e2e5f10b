// FP8 products with promoted accumulation (sm_90a): after every 128 elements of k, the tensor
// cores' partial sum is multiplied by its scales and added to float accumulators.
//
// The tensor cores accumulate FP8 products with about 14 bits: each term is aligned to the largest
// term of the sum and truncated. Sums of 128 products lose little precision; sums over all of k
// would lose more with every step.
//
//   Scales          the scales of partial sums:
//                   kStageBytes: size of a step's scales, stored in a stage after the operands;
//                   Cursor(scales, tile): the scales of one tile, with factors(stage, row_tile),
//                   promote<Boundary>(sums, partial, factors), and with_boundary(body), which
//                   calls body(Constant<Boundary>)
//     UnitScales    none: tensor- and row-wise scales are applied in the epilogue
//     BlockScales   one scale for 128 elements of a row of a, one for a block of 128 x 128 of b
//
// Partials 1: a warpgroup waits for its partial sum and promotes it while the other warpgroup's
// wgmmas run. Partials 2: a warpgroup promotes a partial sum while the wgmmas of its own next step
// run, so that one warpgroup keeps the tensor cores busy. Partials 2 is register-limited: one row
// tile of up to 128 columns.
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/warp_uniform.cuh"

namespace cukit {

constexpr int kPromotedDepth = 128;  // elements of k per partial sum: one step
constexpr int kScaleBlock = 128;     // columns of b that share a scale

// ---- Scales ----

template <int Value>
struct Constant {
  static constexpr int value = Value;
};

// Partial sums are added unscaled.
struct UnitScales {
  static constexpr int kStageBytes = 0;

  struct Factors {};

  class Cursor {
   public:
    CUKIT_DEVICE Cursor(const UnitScales&, const MatrixTile&) {}
    CUKIT_DEVICE Factors factors(const unsigned char*, int) const { return {}; }

    template <typename Body>
    CUKIT_DEVICE void with_boundary(const Body& body) const {
      body(Constant<0>{});
    }

    template <int, int N>
    CUKIT_DEVICE void promote(float (&sums)[N], const float (&partial)[N], const Factors&) const {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] += partial[i];
    }
  };
};

// Scales in a stage, after the operands: a step's scales of a, one per row, and of b, one per block
// of columns that overlaps the tile.
template <typename Shape>
struct BlockScales {
  // The largest power of two that divides kTileN: tiles start, and blocks of columns end within a
  // tile, at multiples of kUnit columns.
  static constexpr int kUnit = Shape::kTileN & -Shape::kTileN;
  // A tile is within one block of columns if its width divides that of the block; other tiles may
  // cross block boundaries.
  static constexpr bool kOneBlock = kScaleBlock % Shape::kTileN == 0;
  static constexpr int kBlocks =
      kOneBlock ? 1 : 1 + (Shape::kTileN - kUnit + kScaleBlock - 1) / kScaleBlock;
  // For wide tiles the block of each column is a compile-time constant: the other warpgroup's
  // wgmmas would not hide the cost of a selection at run time for every 16 columns. Narrow tiles
  // are memory-bound, which hides it.
  static constexpr bool kStaticBoundary = Shape::kTileN > kScaleBlock;

  static constexpr int kRowBytes = Shape::kTileM * static_cast<int>(sizeof(float));
  static constexpr int kColumnBytes = kBlocks * static_cast<int>(sizeof(float));
  static constexpr int kStageBytes = (kRowBytes + kColumnBytes + 1023) / 1024 * 1024;  // aligned
  static constexpr int kColumns = Shape::kStageBytes + kStageBytes - kColumnBytes;

  static_assert(kUnit <= kScaleBlock, "a tile starts or ends within a block of columns");
  static_assert(kStaticBoundary || kBlocks <= 2, "at most one boundary at run time");

  int consumer;

  struct Factors {
    float of[kBlocks][2];  // for the lane's two rows and the columns of each block
  };

  class Cursor {
   public:
    // rows_before_tile: the scales of a in a stage begin that many rows before the tile's first.
    CUKIT_DEVICE Cursor(const BlockScales& scales, const MatrixTile& tile, int rows_before_tile = 0)
        : row_(scales.consumer * Shape::kConsumerRows + accumulator_row() + rows_before_tile),
          boundary_(kScaleBlock - Shape::column(tile) % kScaleBlock) {}

    CUKIT_DEVICE Factors factors(const unsigned char* stage, int row_tile) const {
      const float* a = reinterpret_cast<const float*>(stage + Shape::kStageBytes) + row_ +
                       row_tile * kWarpgroupRows;
      const float* b = reinterpret_cast<const float*>(stage + kColumns);
      const float rows[2] = {a[0], a[8]};
      Factors factors;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float column = b[block];
        factors.of[block][0] = rows[0] * column;
        factors.of[block][1] = rows[1] * column;
      }
      __syncwarp();  // all lanes have read the stage before one lane releases it
      return factors;
    }

    // Calls body(Constant<Boundary>): the number of the tile's columns in the first block of
    // scales, or 0 if it is only known at run time (boundary_).
    template <int Boundary = kUnit, typename Body>
    CUKIT_DEVICE void with_boundary(const Body& body) const {
      if constexpr (!kStaticBoundary) {
        body(Constant<0>{});
      } else if constexpr (Boundary == kScaleBlock) {
        body(Constant<Boundary>{});
      } else if (boundary_ == Boundary) {
        body(Constant<Boundary>{});
      } else {
        with_boundary<Boundary + kUnit>(body);
      }
    }

    template <int Boundary, int N>
    CUKIT_DEVICE void promote(float (&sums)[N], const float (&partial)[N],
                              const Factors& factors) const {
      // Blocks end at multiples of 16 columns of a tile.
#pragma unroll
      for (int pair = 0; pair < N / 8; ++pair) {
        const float factor[2] = {factor_of<Boundary>(factors, 16 * pair, 0),
                                 factor_of<Boundary>(factors, 16 * pair, 1)};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[8 * pair + i] += factor[i / 2 % 2] * partial[8 * pair + i];
        }
      }
    }

   private:
    template <int Boundary>
    CUKIT_DEVICE float factor_of(const Factors& factors, int column, int half) const {
      if constexpr (kOneBlock) {
        return factors.of[0][half];
      } else if constexpr (Boundary > 0) {
        return factors.of[(column + kScaleBlock - Boundary) / kScaleBlock][half];
      } else {
        return column < boundary_ ? factors.of[0][half] : factors.of[1][half];
      }
    }

    int row_, boundary_;
  };
};

// Scales of blocks of columns: b [blocks, steps], one row per 128 columns.
template <typename Shape>
struct ColumnScales {
  static constexpr int kArrivals = 2;  // per stage: TMA loads, and cp.async copies of the scales
  const float* b;
  int steps, blocks;

  // Issues the copies of a step's scales for the tile at `column`; one thread.
  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, int column, int step) const {
    const int first = column / kScaleBlock;
    const float* const from = b + static_cast<long long>(first) * steps + step;
    const unsigned to = shared_address(stage + BlockScales<Shape>::kColumns);
#pragma unroll
    for (int block = 0; block < BlockScales<Shape>::kBlocks; ++block) {
      const bool exists = first + block < blocks;
      cp_async_cached<4>(to + 4 * block, exists ? from + block * steps : from, exists);
    }
    cp_async_arrive(full);
  }
};

// ---- Operands ----

// DenseOperands, followed in each stage by a step's scales: those of a from a tensor map
// [k / 128, rows] with boxes of [1, TileM], and those of b.
template <typename Shape>
struct BlockScaledOperands {
  static constexpr int kStageBytes = Shape::kStageBytes + BlockScales<Shape>::kStageBytes;
  static constexpr int kArrivals = ColumnScales<Shape>::kArrivals;
  DenseOperands<Shape, kStageBytes> operands;
  const TensorMap* scales;
  ColumnScales<Shape> columns;

  CUKIT_DEVICE int bytes(const MatrixTile& tile) const {
    return operands.bytes(tile) + BlockScales<Shape>::kRowBytes;
  }

  template <int Stages>
  CUKIT_DEVICE void clear_rest(unsigned char* stages) const {
    operands.template clear_rest<Stages>(stages);
  }

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const MatrixTile& tile,
                         int step) const {
    operands.load(stage, full, tile, step);
    tma_load_2d(stage + Shape::kStageBytes, scales, full, operands.row(tile), step);
    columns.load(stage, full, Shape::column(tile), step);
  }
};

// ---- Product ----

template <typename Shape, typename Scales, int Partials>
struct PromotedProduct {
  using Accumulators = float[Shape::kRowTiles][Shape::kTileN / 2];
  using Partial = float[Shape::kTileN / 2];
  static constexpr int kStageBytes = Shape::kStageBytes + Scales::kStageBytes;

  static_assert(Shape::kCluster == 1, "stages that ordinary loads read are released within a block");
  static_assert(sizeof(typename Shape::Element) == 1 && Shape::kTileK == kPromotedDepth,
                "one step per promotion");
  static_assert(Partials == 1 || (Partials == 2 && Shape::kRowTiles == 1 && Shape::kTileN <= 128),
                "partial sums fit into registers");

  const unsigned char* stages;
  unsigned long long a, b;  // descriptors of this consumer's operands in stage 0
  Scales scales;

  CUKIT_DEVICE PromotedProduct(const unsigned char* stages, int consumer, const Scales& scales)
      : stages(stages),
        a(Shape::TileA::descriptor(stages) + consumer * Shape::TileA::along(Shape::kConsumerRows)),
        b(Shape::TileB::descriptor(stages + Shape::TileA::kBytes)),
        scales(scales) {}

  template <int Stages, typename Tile>
  CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& state, const Tile& tile) const {
#pragma unroll
    for (int row = 0; row < Shape::kRowTiles; ++row)
#pragma unroll
      for (int i = 0; i < Shape::kTileN / 2; ++i) sums[row][i] = 0.0f;
    const typename Scales::Cursor tile_scales(scales, tile);
    tile_scales.with_boundary([&](auto boundary) {
      constexpr int kBoundary = decltype(boundary)::value;
      if constexpr (Partials == 1) {
        promote_at_once<kBoundary>(sums, tile_scales, pipeline, state, tile);
      } else {
        promote_overlapped<kBoundary>(sums, tile_scales, pipeline, state, tile);
      }
    });
  }

 private:
  // Issues the wgmmas of one step for 64 rows.
  CUKIT_DEVICE void issue(Partial& partial, int stage, int row_tile) const {
    using TileA = typename Shape::TileA;
    using TileB = typename Shape::TileB;
    const unsigned long long offset = stage * (kStageBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TileA::kSteps; ++k) {
      wgmma<typename Shape::Element, Shape::kTileN>(
          partial, a + offset + TileA::along(row_tile * kWarpgroupRows) + TileA::step(k),
          b + offset + TileB::step(k), k > 0);
    }
    wgmma_commit();
  }

  template <int Boundary, int Stages, typename TileScales, typename Tile>
  CUKIT_DEVICE void promote_at_once(Accumulators& sums, const TileScales& tile_scales,
                                    Pipeline<Stages>& pipeline, PipelineState<Stages>& state,
                                    const Tile& tile) const {
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.wait(state);
#pragma unroll
      for (int row = 0; row < Shape::kRowTiles; ++row) {
        Partial partial;
        const auto factors = tile_scales.factors(stages + state.index * kStageBytes, row);
        issue(partial, state.index, row);
        wgmma_wait<0>(partial);
        if (row == Shape::kRowTiles - 1) pipeline.release(state);
        tile_scales.template promote<Boundary>(sums[row], partial, factors);
      }
      state.advance();
    }
  }

  template <int Boundary, int Stages, typename TileScales, typename Tile>
  CUKIT_DEVICE void promote_overlapped(Accumulators& sums, const TileScales& tile_scales,
                                       Pipeline<Stages>& pipeline, PipelineState<Stages>& state,
                                       const Tile& tile) const {
    using Factors = typename Scales::Factors;
    Partial even, odd;
    Factors even_factors, odd_factors;
    PipelineState<Stages> done = state;
    int step = tile.first_step;

    // Issues the wgmmas of a step, which accumulate in `partial`.
    const auto begin = [&](Partial& partial, Factors& factors) {
      pipeline.wait(state);
      factors = tile_scales.factors(stages + state.index * kStageBytes, 0);
      issue(partial, state.index, 0);
      state.advance();
      ++step;
    };
    // Promotes `partial` of the oldest step, whose wgmmas have completed.
    const auto finish = [&](const Partial& partial, const Factors& factors) {
      pipeline.release(done);
      done.advance();
      tile_scales.template promote<Boundary>(sums[0], partial, factors);
    };

    begin(even, even_factors);
    while (step + 1 < tile.end_step) {
      begin(odd, odd_factors);
      wgmma_wait<1>(even);
      finish(even, even_factors);
      begin(even, even_factors);
      wgmma_wait<1>(odd);
      finish(odd, odd_factors);
    }
    if (step < tile.end_step) {
      begin(odd, odd_factors);
      wgmma_wait<1>(even);
      finish(even, even_factors);
      wgmma_wait<0>(odd);
      finish(odd, odd_factors);
    } else {
      wgmma_wait<0>(even);
      finish(even, even_factors);
    }
  }
};

}  // namespace cukit
