// Products of float8 operands on Hopper whose sums are promoted: every 128 elements of k, a partial sum
// of the tensor cores is added to float accumulators, times the scales of its elements (sm_90a).
//
// The tensor cores add float8 products with about 14 bits: each is cut below the largest number of the
// sum. Sums of 128 products lose little to that; sums over all of k would lose more with every step.
//
//   PartialScales   what a partial sum is multiplied with:   kStageBytes behind the operands,
//                   Cursor, at the start of a tile: factors(stage, step, row_tile), and
//                   promote(sums, partial, factors)
//     UnitScales    nothing: tensor- and row-wise scales belong to the epilogue
//     BlockScales   one scale for 128 elements of a row of a, one for a block of 128 x 128 of b
//
// Partials 1: a warpgroup waits for its partial sum and promotes it while the other warpgroup's products
// run. Partials 2: the products of the next step run meanwhile, so that one warpgroup keeps the tensor
// cores busy; for one row tile and up to 128 columns, as registers allow.
#pragma once

#include "common/hopper/gemm.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/warp_uniform.cuh"

namespace cukit {

constexpr int kPromotedDepth = 128;  // of k, between promotions: a step
constexpr int kScaleBlock = 128;     // columns of b that share a scale

// ---- Scales ----

// Partial sums are added as they are.
struct UnitScales {
  static constexpr int kStageBytes = 0;

  struct Factors {};

  class Cursor {
   public:
    CUKIT_DEVICE Cursor(const UnitScales&, const MatrixTile&) {}
    CUKIT_DEVICE Factors factors(const unsigned char*, int, int) { return {}; }

    template <int N>
    CUKIT_DEVICE void promote(float (&sums)[N], const float (&partial)[N], const Factors&) const {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] += partial[i];
    }
  };
};

// a [rows, k / 128] through a tensor map, one step's scales in each stage behind the operands; b
// [ceil(columns / 128), k / 128] from global memory: lane i of a warp holds the scales of step 32 j + i,
// and those 32 steps later are on their way.
template <typename Shape>
struct BlockScales {
  static constexpr int kStageBytes = 1024;  // a stage begins at a multiple of 1024 bytes
  static constexpr int kLoadedBytes = Shape::kTileM * static_cast<int>(sizeof(float));
  // Tiles that neither divide a block of columns nor consist of such lie across a block's end.
  static constexpr bool kOneBlock = kScaleBlock % Shape::kTileN == 0;

  // Tiles begin at multiples of their widest power of two: so many columns lie in the first block.
  static_assert((Shape::kTileN & -Shape::kTileN) >= Shape::kTileN - kScaleBlock,
                "a tile has columns of two blocks at most");
  static_assert(kLoadedBytes <= kStageBytes, "one box of scales");

  const float* b;
  int row_stride;  // of b: steps of k
  int rows;        // of b
  int group;       // this consumer

  struct Factors {
    float first[2], second[2];  // of the lane's two rows, with columns of the first and second block
  };

  class Cursor {
   public:
    CUKIT_DEVICE Cursor(const BlockScales& scales, const MatrixTile& tile)
        : end_(tile.end_step), row_(scales.group * Shape::kGroupRows + accumulator_row()) {
      const int column = Shape::column(tile);
      const int block = column / kScaleBlock;
      boundary_ = (block + 1) * kScaleBlock - column;
      first_ = scales.b + static_cast<long long>(block) * scales.row_stride;
      second_ = block + 1 < scales.rows ? first_ + scales.row_stride : first_;
      lane_step_ = tile.first_step + static_cast<int>(threadIdx.x) % kWarpSize;
      base_ = tile.first_step;
      fetch();
      turn();
    }

    // To be called with every step of the tile in order; `stage` holds the scales of a.
    CUKIT_DEVICE Factors factors(const unsigned char* stage, int step, int row_tile) {
      if (step - base_ == kWarpSize) {
        base_ = step;
        turn();
      }
      const float* a = reinterpret_cast<const float*>(stage + Shape::kStageBytes) + row_ +
                       row_tile * kWarpgroupRows;
      const float upper = a[0];
      const float lower = a[8];
      __syncwarp();  // one lane releases the stage for all
      const float first = __shfl_sync(kFullMask, now_[0], step - base_);
      Factors factors{{upper * first, lower * first}, {0.0f, 0.0f}};
      if constexpr (!kOneBlock) {
        const float second = __shfl_sync(kFullMask, now_[1], step - base_);
        factors.second[0] = upper * second;
        factors.second[1] = lower * second;
      }
      return factors;
    }

    template <int N>
    CUKIT_DEVICE void promote(float (&sums)[N], const float (&partial)[N],
                              const Factors& factors) const {
      // Blocks end at multiples of 16 columns of a tile.
#pragma unroll
      for (int pair = 0; pair < N / 8; ++pair) {
        const bool first = kOneBlock || 16 * pair < boundary_;
        const float upper = first ? factors.first[0] : factors.second[0];
        const float lower = first ? factors.first[1] : factors.second[1];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float factor = i / 2 % 2 == 0 ? upper : lower;
          sums[8 * pair + i] += factor * partial[8 * pair + i];
        }
      }
    }

   private:
    // Starts loading the scales of the steps from lane_step_ on.
    CUKIT_DEVICE void fetch() {
      const bool exists = lane_step_ < end_;
      next_[0] = exists ? __ldg(first_ + lane_step_) : 0.0f;
      if constexpr (!kOneBlock) next_[1] = exists ? __ldg(second_ + lane_step_) : 0.0f;
    }

    CUKIT_DEVICE void turn() {
      now_[0] = next_[0];
      if constexpr (!kOneBlock) now_[1] = next_[1];
      lane_step_ += kWarpSize;
      fetch();
    }

    const float* first_;
    const float* second_;
    int end_, row_, boundary_, lane_step_, base_;
    float now_[kOneBlock ? 1 : 2], next_[kOneBlock ? 1 : 2];
  };
};

// ---- Operands ----

// DenseOperands, and behind them in each stage a step's scales of a: `scales` [k / 128, rows] through a
// map with boxes of [1, TileM].
template <typename Shape>
struct BlockScaledOperands {
  static constexpr int kStageBytes = Shape::kStageBytes + BlockScales<Shape>::kStageBytes;
  DenseOperands<Shape, kStageBytes> operands;
  const TensorMap* scales;

  CUKIT_DEVICE int bytes(const MatrixTile& tile) const {
    return operands.bytes(tile) + BlockScales<Shape>::kLoadedBytes;
  }

  template <int Stages>
  CUKIT_DEVICE void clear_rest(unsigned char* stages) const {
    operands.template clear_rest<Stages>(stages);
  }

  CUKIT_DEVICE void load(unsigned char* stage, Mbarrier* full, const MatrixTile& tile,
                         int step) const {
    operands.load(stage, full, tile, step);
    tma_load_2d(stage + Shape::kStageBytes, scales, full, operands.row(tile), step);
  }
};

// ---- Product ----

template <typename Shape, typename Scales, int Partials>
struct PromotedProduct {
  using Accumulators = float[Shape::kRowTiles][Shape::kTileN / 2];
  using Partial = float[Shape::kTileN / 2];
  static constexpr int kStageBytes = Shape::kStageBytes + Scales::kStageBytes;

  static_assert(sizeof(typename Shape::Element) == 1 && Shape::kTileK == kPromotedDepth,
                "a step is what is summed up between promotions");
  static_assert(Shape::kCluster == 1, "a stage that ordinary loads read is released within its block");
  static_assert(Partials == 1 || (Partials == 2 && Shape::kRowTiles == 1 && Shape::kTileN <= 128),
                "partial sums that registers hold");

  const unsigned char* stages;
  unsigned long long a, b;  // descriptors of this consumer's operands in stage 0
  Scales scales;

  CUKIT_DEVICE PromotedProduct(const unsigned char* stages, int group, const Scales& scales)
      : stages(stages),
        a(Shape::TileA::descriptor(stages) + group * Shape::TileA::along(Shape::kGroupRows)),
        b(Shape::TileB::descriptor(stages + Shape::TileA::kBytes)),
        scales(scales) {}

  template <int Stages, typename Tile>
  CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline<Stages>& pipeline,
                             PipelineState<Stages>& at, const Tile& tile) const {
#pragma unroll
    for (int row = 0; row < Shape::kRowTiles; ++row)
#pragma unroll
      for (int i = 0; i < Shape::kTileN / 2; ++i) sums[row][i] = 0.0f;
    typename Scales::Cursor cursor(scales, tile);
    if constexpr (Partials == 1) {
      promote_at_once(sums, cursor, pipeline, at, tile);
    } else {
      promote_beside_products(sums, cursor, pipeline, at, tile);
    }
  }

 private:
  // Starts the products of one step for 64 rows.
  CUKIT_DEVICE void start(Partial& partial, int stage, int row_tile) const {
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

  template <int Stages, typename Cursor, typename Tile>
  CUKIT_DEVICE void promote_at_once(Accumulators& sums, Cursor& cursor, Pipeline<Stages>& pipeline,
                                    PipelineState<Stages>& at, const Tile& tile) const {
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.wait(at);
#pragma unroll
      for (int row = 0; row < Shape::kRowTiles; ++row) {
        Partial partial;
        start(partial, at.index, row);
        const auto factors = cursor.factors(stages + at.index * kStageBytes, step, row);
        wgmma_wait<0>(partial);
        if (row == Shape::kRowTiles - 1) pipeline.release(at);
        cursor.promote(sums[row], partial, factors);
      }
      at.advance();
    }
  }

  template <int Stages, typename Cursor, typename Tile>
  CUKIT_DEVICE void promote_beside_products(Accumulators& sums, Cursor& cursor,
                                            Pipeline<Stages>& pipeline, PipelineState<Stages>& at,
                                            const Tile& tile) const {
    using Factors = typename Scales::Factors;
    Partial even, odd;
    Factors even_factors, odd_factors;
    PipelineState<Stages> done = at;
    int step = tile.first_step;

    // The products of a step, whose sums go to `partial`.
    const auto begin = [&](Partial& partial, Factors& factors) {
      pipeline.wait(at);
      start(partial, at.index, 0);
      factors = cursor.factors(stages + at.index * kStageBytes, step, 0);
      at.advance();
      ++step;
    };
    // The oldest step has been multiplied, into `partial`.
    const auto finish = [&](const Partial& partial, const Factors& factors) {
      pipeline.release(done);
      done.advance();
      cursor.promote(sums[0], partial, factors);
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
