// Products of float8 activations with an int4 weight that the same kernel expands to float8 in
// global memory, on Hopper: for many tokens, where decoding in each tile would take longer than
// the products.
//
//   codes[n, k] = code[n, k] - zero_point[n, g]          integers from -15 to 15: exact in e4m3
//   out[m, n] = token_scale[m] sum_g scale[n, g] (sum_{k in g} x[m, k] codes[n, k]) + bias[n]
//
// Mapping: as in matmul_8bit_sm90.cu, with operands swapped as in weight_only_sm90.cu: out^T = W
//   x^T in tiles of 256 rows of the weight x TOKENS tokens, by a producer warp and two consumer
//   warpgroups of 128 rows each. A k step is a group of 128; the tensor cores' sum of a group is
//   multiplied by its scale and added in float (common/hopper/promoted_product.cuh).
// Expansion: the other three warps of the producer warpgroup claim packed blocks (64 rows x 128
//   columns) in the order in which the products use them, and count the blocks that they have
//   written for each tile row and step; the producer warp waits for the full count. A thread block
//   waits only for thread blocks that are running, since only these claim packed blocks.
// Expanded weight: [ceil(rows / 128)][steps][kUnitBytes]: a swizzled tile [128, 128] of codes, in
//   the layout of shared memory, so that a plain bulk copy loads it; then the float scales of its
//   rows.
// Shared memory, bytes, dynamic: STAGES * ((256 + TOKENS) * 128 + 1024): stages (codes | x | scales
//   of the rows); then a store buffer [PIECE, 64] of out for each consumer. Static: two barriers
//   per stage, 2 KiB for each expanding warp, the float8 tables.
// Macros: those of gemm/weight_only.cuh, with FLOAT8 1, BITS 4, GROUP 128, FOLD 0, CONSUMERS 2,
//   TOKENS a multiple of 32 up to 128; PIECE 32|64, a divisor of TOKENS; STAGES 2..; THREADS 384.
// Tensor maps: x [tokens, k], boxes of [TOKENS, 128]; out [tokens, rows], boxes of [PIECE, 64].
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/codes.cuh"
#include "common/hopper/gemm.cuh"
#include "common/hopper/promoted_product.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/global_order.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_only.cuh"

namespace {

// A unit of the expanded weight: 128 rows x 128 columns.
using Unit = cukit::SharedTile<unsigned char, 2 * cukit::kBlockRows, cukit::kBlockColumns>;
constexpr int kUnitScaleBytes = Unit::kRows * static_cast<int>(sizeof(float));
constexpr int kUnitBytes = Unit::kBytes + kUnitScaleBytes;
constexpr int kUnits = 2;               // units of a tile, one below the other
constexpr int kTileBlocks = 2 * kUnits;  // packed blocks of a tile and step

using Shape = cukit::GemmShape<cukit::Float8E4M3, kUnits * Unit::kRows, TOKENS, 1, CONSUMERS>;
using Block = cukit::WarpSpecialized<CONSUMERS, 56>;
using Store = cukit::TransposedStore<T, TOKENS, PIECE>;

static_assert(THREADS == Block::kThreads, "a producer and its consumers");
static_assert(FLOAT8 && BITS == 4 && GROUP == cukit::kBlockColumns, "a group is a step of k");

// One scale for 128 elements of a row of the weight.
struct RowScales {
  static constexpr int kStageBytes = kUnits * kUnitScaleBytes;
  int consumer;

  struct Factors {
    float of[2];  // for the lane's two rows
  };

  class Cursor {
   public:
    CUKIT_DEVICE Cursor(const RowScales& scales, const cukit::MatrixTile&)
        : row_(scales.consumer * Shape::kConsumerRows + cukit::accumulator_row()) {}

    CUKIT_DEVICE Factors factors(const unsigned char* stage, int row_tile) const {
      const float* const scales = reinterpret_cast<const float*>(stage + Shape::kStageBytes) + row_ +
                                  row_tile * cukit::kWarpgroupRows;
      const Factors factors{{scales[0], scales[8]}};
      __syncwarp();  // all lanes have read the stage before one lane releases it
      return factors;
    }

    template <typename Body>
    CUKIT_DEVICE void with_boundary(const Body& body) const {
      body(cukit::Constant<0>{});
    }

    template <int, int N>
    CUKIT_DEVICE void promote(float (&sums)[N], const float (&partial)[N],
                              const Factors& factors) const {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] += factors.of[i / 2 % 2] * partial[i];
    }

   private:
    int row_;
  };
};

using Product = cukit::PromotedProduct<Shape, RowScales, 1>;

struct Operands {
  static constexpr int kStageBytes = Product::kStageBytes;
  const cukit::TensorMap* x;
  const unsigned char* expanded;
  int steps, units;  // units: along the rows

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const cukit::MatrixTile& tile,
                         int step) const {
    Shape::TileB::Tile::load(stage + Shape::TileA::kBytes, x, full, step * Shape::kTileK,
                             tile.n * TOKENS);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      // Beyond the last rows the last unit is loaded again; its product is not stored.
      const unsigned row = min(tile.m * kUnits + i, units - 1);
      const unsigned char* const from =
          expanded + (row * steps + step) * static_cast<unsigned long long>(kUnitBytes);
      cukit::bulk_load(stage + i * Unit::kBytes, from, Unit::kBytes, full);
      cukit::bulk_load(stage + Shape::kStageBytes + i * kUnitScaleBytes, from + Unit::kBytes,
                       kUnitScaleBytes, full);
    }
  }
};

constexpr int kExpanders = cukit::kWarpgroupWarps - 1;
constexpr int kStripRows = 16;
constexpr int kStripBytes = kStripRows * cukit::kBlockColumns;
constexpr int kStrips = cukit::kBlockRows / kStripRows;

// Expands the weight while the products run.
struct Expansion {
  const unsigned char* weight;
  unsigned char* expanded;
  int* claimed;  // packed blocks
  int* ready;    // [tile rows, steps]: packed blocks that have been expanded
  int steps;
  int units;         // along the rows
  int raster_group;  // tile rows of a rasterisation group

  // Packed blocks of a tile row and step.
  CUKIT_DEVICE int expected(int tile_row) const {
    return min(kTileBlocks, 2 * units - tile_row * kTileBlocks);
  }

  // Claims and expands packed blocks until none are left. Called by a warp; `strip`: kStripBytes of
  // shared memory for this warp.
  CUKIT_DEVICE void run(unsigned char* strip, const unsigned char* tables) const {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const int blocks = 2 * units;
    const int group_blocks = kTileBlocks * raster_group;
    for (;;) {
      int claim = 0;
      if (lane == 0) claim = atomicAdd(claimed, 1);
      claim = cukit::warp_uniform(claim);
      if (claim >= blocks * steps) return;
      const int first = claim / (group_blocks * steps) * group_blocks;
      const int within = claim - first * steps;
      const int rows = min(group_blocks, blocks - first);
      const int step = within / rows;
      const int block = first + within - step * rows;
      expand(block, step, strip, tables);
      cukit::fence_proxy_async_global();
      __syncwarp();
      if (lane == 0) cukit::add_release(ready + block / kTileBlocks * steps + step, 1);
    }
  }

  // Loads all tiles, each step as soon as its part of the weight is ready; called by a warp.
  template <typename Schedule>
  CUKIT_DEVICE void produce(cukit::Pipeline<STAGES>& pipeline, unsigned char* stages,
                            const Schedule& schedule, const Operands& operands) const {
    const int lane = threadIdx.x % cukit::kWarpSize;
    cukit::PipelineState<STAGES> state;
    cukit::MatrixTile tile;
    for (int turn = 0; schedule.tile(turn, tile); ++turn) {
      int until = 0;
      for (int step = 0; step < steps; ++step) {
        while (step >= until) {
          const int at = min(step + lane, steps - 1);
          const bool is_ready =
              cukit::load_acquire(ready + tile.m * steps + at) == expected(tile.m);
          const unsigned waiting = __ballot_sync(cukit::kFullMask, !is_ready);
          until = step + (waiting ? __ffs(waiting) - 1 : cukit::kWarpSize);
          cukit::fence_proxy_async_global();
        }
        pipeline.acquire(state);
        __syncwarp();  // otherwise a lane could wait for this phase after the next has ended
        if (lane == 0) {
          cukit::Mbarrier* const full = pipeline.expect(state, Operands::kStageBytes);
          operands.load(stages + state.index * Operands::kStageBytes, full, tile, step);
        }
        state.advance();
      }
    }
  }

 private:
  CUKIT_DEVICE void expand(int block, int step, unsigned char* strip,
                           const unsigned char* tables) const {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const long long unit = static_cast<long long>(block / 2) * steps + step;
    const unsigned char* const from = weight + (2 * unit + block % 2) * Weight::kBytes;
    unsigned char* const to = expanded + unit * kUnitBytes;
    const int first_row = block % 2 * cukit::kBlockRows;
    constexpr int kBatch = 2;  // strips that are loaded together
#pragma unroll 1
    for (int batch = 0; batch < kStrips; batch += kBatch) {
      uint4 codes[kBatch][2];
      unsigned zero_points[kBatch];
      cukit::Vec<Scale, 2> scales[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int thread = (batch + i) * cukit::kWarpSize + lane;
        const uint4* const chunk = reinterpret_cast<const uint4*>(from) + thread;
        codes[i][0] = __ldg(chunk);
        codes[i][1] = __ldg(chunk + cukit::kWarpgroupThreads);
        zero_points[i] = Weight::zero_points(from, 0, thread);
        scales[i] = Weight::scale_pair(from, 0, thread);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = lane / 4;
        const int strip_row = first_row + (batch + i) * kStripRows;
        if (lane % 4 == 0) {
          float factors[2];
          cukit::to_floats(factors, scales[i]);
          float* const all = reinterpret_cast<float*>(to + Unit::kBytes) + strip_row;
          all[row] = factors[0];
          all[row + 8] = factors[1];
        }
        const Codes::Zeros zeros = Weight::zeros(zero_points[i], tables);
        const unsigned words[8] = {codes[i][0].x, codes[i][0].y, codes[i][0].z, codes[i][0].w,
                                   codes[i][1].x, codes[i][1].y, codes[i][1].z, codes[i][1].w};
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          unsigned a[4];
          Codes::decode(a, &words[2 * part], zeros);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const unsigned chunk = Unit::address(0, row + j % 2 * 8, 2 * part + j / 2);
            *reinterpret_cast<unsigned*>(strip + chunk + 4 * (lane % 4)) = a[j];
          }
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kStripBytes / 512; ++j) {
          const int at = (j * cukit::kWarpSize + lane) * 16;
          *reinterpret_cast<uint4*>(to + strip_row * cukit::kBlockColumns + at) =
              *reinterpret_cast<const uint4*>(strip + at);
        }
        __syncwarp();
      }
    }
  }
};

struct Results {
  Epilogue epilogue;
  const cukit::TensorMap* out;
  unsigned char* buffer;  // of this consumer
  int consumer;

  CUKIT_DEVICE void store(Product::Accumulators& sums, const cukit::MatrixTile& tile) const {
    const int token = tile.n * TOKENS;
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles; ++i) {
      const int row =
          Shape::row(tile) + consumer * Shape::kConsumerRows + i * cukit::kWarpgroupRows;
      epilogue.finish(sums[i], row, token);
#pragma unroll
      for (int first = 0; first < TOKENS; first += PIECE) {
        Store::store_piece(&sums[i][first / 2], buffer, 1 + consumer, [&] {
          if (row < epilogue.rows && token + first < epilogue.tokens) {
            Store::Piece::store(out, buffer, row, token + first, epilogue.rows);
          }
        });
      }
    }
  }

  CUKIT_DEVICE void finish() const { Store::finish(); }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) weight_expanded_sm90(
    const __grid_constant__ cukit::TensorMap x,    // [tokens, k]
    const __grid_constant__ cukit::TensorMap out,  // [tokens, rows]
    const unsigned char* __restrict__ weight,      // [ceil(rows / 128)][steps][2][block bytes]
    const float* __restrict__ token_scales,        // [tokens] or [1]
    const T* __restrict__ bias,                    // [rows] or null
    unsigned char* expanded,                       // [ceil(rows / 128)][steps][kUnitBytes]
    int* counters,  // [1 + tile rows * steps] of zeros: claimed and expanded packed blocks
    const cukit::WeightOnlyParameters p) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  __shared__ __align__(16) unsigned char strips[kExpanders][kStripBytes];
  __shared__ __align__(16) unsigned char tables[Codes::kTableBytes];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::DenseTiles<> schedule{{(p.rows + Shape::kTileM - 1) / Shape::kTileM,
                                      (p.tokens + TOKENS - 1) / TOKENS, p.raster_group, p.steps,
                                      1}};
  Codes::prepare(tables, threadIdx.x, THREADS);
  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        const int units = (p.rows + Unit::kRows - 1) / Unit::kRows;
        const Expansion expansion{weight, expanded, counters, counters + 1, p.steps, units,
                                  p.raster_group};
        const int warp = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize);
        if (warp == 0) {
          expansion.produce(pipeline, stages, schedule, {&x, expanded, p.steps, units});
        } else {
          expansion.run(strips[warp - 1], tables);
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        const Product product(stages, consumer, RowScales{consumer});
        Results results{{bias, nullptr, token_scales, p.token_stride, p.tokens, p.rows},
                        &out,
                        stages + STAGES * Operands::kStageBytes + consumer * Store::kBytes,
                        consumer};
        cukit::consume(pipeline, schedule, product, results);
      });
}
