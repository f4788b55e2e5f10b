// The gradient of a gated linear layer's preactivation through the linear layer after it, on Hopper:
// a dense product whose epilogue is the activation's gradient.
//
//   h = grad_out w                          the gradient of the gated layer's result
//   grad = [h up f'(gate) | h f(gate)]      z = [gate | up]; f: ReLU, GELU, SiLU
//
// h is never stored: it stays in float accumulators.
//
// Mapping: as linear_sm90.cu. Persistent blocks compute TILE_M x TILE_N tiles of h; a thread of the
//   first warpgroup loads both operands in k steps of 64, and two consumer warpgroups multiply half
//   of the tile's rows each. After the last k step of a tile the same thread loads the tile's elements of
//   gate and up into the next two stages. The consumers overwrite these with the gradients, which
//   TMA stores. The two stages are released once TMA has read them, during the first k step of the
//   next tile.
// Shared memory, dynamic: STAGES * (TILE_M + TILE_N) * 128 bytes, of operands a | b or of a tile
//   [TILE_M, TILE_N] of z. Static: two barriers per stage.
// Macros: DTYPE float16|bfloat16; TILE_M, TILE_N 128; STAGES at least 4; THREADS 384; ACTIVATION
//   Relu|GeluErf|GeluTanh|Silu.
// Tensor maps: grad_out boxes [TILE_M, 64]; w boxes [64, 64]; z boxes [TILE_M, 64]; grad boxes
//   [64, 64]; swizzled in rows of 128 bytes. Rows outside read as zeros and are not written; n is a
//   multiple of TILE_N.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "common/activation.cuh"
#include "common/hopper/gemm.cuh"
#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/pack.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using Activation = cukit::ACTIVATION<T>;
using cukit::kWarpgroupRows;
using cukit::kWarpgroupThreads;
using cukit::Major;
using Tile = cukit::MatrixTile;
using State = cukit::PipelineState<STAGES>;

constexpr int kConsumers = 2;
using Shape = cukit::GemmShape<T, TILE_M, TILE_N, 1, kConsumers, Major::K, Major::MN>;
using Block = cukit::WarpSpecialized<kConsumers, 40>;
using Part = cukit::SharedTile<T, TILE_M, TILE_N>;  // gate or up of a tile, then its gradient

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(Part::kBytes == Shape::kStageBytes && Shape::kRowTiles == 1, "a stage holds a part");
static_assert(STAGES >= 4, "the next tile's first k step is loaded while two parts are stored");

// The operands of the k steps, then gate, then up.
struct Operands {
  static constexpr int kStageBytes = Shape::kStageBytes;
  cukit::DenseOperands<Shape> product;
  const cukit::TensorMap* z;
  int steps;

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
    if (step < steps) {
      product.load(stage, full, tile, step);
    } else {
      const int first = step > steps ? product.columns : 0;
      Part::load(stage, z, full, first + Shape::column(tile), Shape::row(tile));
    }
  }
};

// The consumer's part of a tile after its k steps.
struct Epilogue {
  unsigned char* stages;
  const cukit::TensorMap* grad;
  int rows, columns;  // of h
  int group;          // this consumer
  State stored;       // the stages that TMA may still be reading: this one and the next
  bool any = false;

  template <typename Sums>
  CUKIT_DEVICE void store(const Sums& sums, cukit::Pipeline<STAGES>& pipeline, State& state,
                          const Tile& tile) {
    const int row = Shape::row(tile) + group * kWarpgroupRows;
    stored = state;
    any = true;
    unsigned char* parts[2];
#pragma unroll
    for (int up = 0; up < 2; ++up) {
      pipeline.wait(state);
      parts[up] = stages + state.index * Shape::kStageBytes;
      state.advance();
    }
    differentiate(sums[0], parts);
    cukit::fence_proxy_async();
    cukit::named_sync(1 + group, kWarpgroupThreads);  // the gradients are written
    if (threadIdx.x % kWarpgroupThreads == 0) {
      for (int up = 0; up < 2 && row < rows; ++up) {
        store_part(parts[up], Shape::column(tile) + up * columns, row);
      }
      cukit::bulk_commit();
    }
  }

  // Releases the stages that were stored last, once TMA has read them.
  CUKIT_DEVICE void release(cukit::Pipeline<STAGES>& pipeline) {
    if (!any) return;
    if (threadIdx.x % kWarpgroupThreads == 0) cukit::bulk_wait_read<0>();
    pipeline.release(stored);
    stored.advance();
    pipeline.release(stored);
  }

  CUKIT_DEVICE void finish() const {
    if (threadIdx.x % kWarpgroupThreads == 0) cukit::bulk_wait_read<0>();
  }

 private:
  // Replaces gate and up by their gradients. `outer`: this lane's elements of h.
  template <int N>
  CUKIT_DEVICE void differentiate(const float (&outer)[N], unsigned char* const (&parts)[2]) const {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const int warp = threadIdx.x % kWarpgroupThreads / cukit::kWarpSize;
    const int own_row = group * kWarpgroupRows + warp * 16 + lane % 16;
#pragma unroll
    for (int block = 0; block < TILE_N / 16; ++block) {
      unsigned at[2], packed[2][4];
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        at[up] = Part::address(cukit::shared_address(parts[up]), own_row, 2 * block + lane / 16);
        cukit::ldmatrix_x4(packed[up], at[up]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float gate[2], up[2];
        cukit::unpack<T>(gate, packed[0][j]);
        cukit::unpack<T>(up, packed[1][j]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float h = outer[8 * block + 2 * j + i];
          float slope;
          const float value = Activation::value_and_slope(gate[i], &slope);
          gate[i] = h * up[i] * slope;
          up[i] = h * value;
        }
        packed[0][j] = cukit::pack<T>(gate[0], gate[1]);
        packed[1][j] = cukit::pack<T>(up[0], up[1]);
      }
#pragma unroll
      for (int up = 0; up < 2; ++up) cukit::stmatrix_x4(at[up], packed[up]);
    }
  }

  // The rows of this consumer, in boxes of 64 x 64.
  CUKIT_DEVICE void store_part(const unsigned char* part, int column, int row) const {
    const unsigned char* const own = part + group * kWarpgroupRows * Part::kRowBytes;
#pragma unroll
    for (int box = 0; box < Part::kParts; ++box) {
      cukit::tma_store_2d(grad, own + box * Part::kPartBytes, column + box * Part::kPartColumns,
                          row);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gated_gradient_sm90(const __grid_constant__ cukit::TensorMap grad_out,  // [m, k]
                        const __grid_constant__ cukit::TensorMap w,         // [k, n]
                        const __grid_constant__ cukit::TensorMap z,         // [m, 2 n]
                        const __grid_constant__ cukit::TensorMap grad,      // [m, 2 n]
                        const cukit::GemmParameters p) {
  __shared__ cukit::Pipeline<STAGES> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const auto schedule = [&](int steps) {
    return cukit::DenseTiles<>{{(p.m + TILE_M - 1) / TILE_M, p.n / TILE_N, p.group, steps, 1}};
  };
  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          const Operands operands{{&grad_out, &w, p.m, p.n}, &z, p.steps};
          cukit::produce(pipeline, stages, schedule(p.steps + 2), operands);
        }
      },
      [&] {
        const int group = Block::consumer_group();
        const cukit::SharedProduct<Shape> product(stages, group);
        const cukit::DenseTiles<> tiles = schedule(p.steps);
        Epilogue epilogue{stages, &grad, p.m, p.n, group};
        State state;
        Tile tile;
        typename cukit::SharedProduct<Shape>::Accumulators sums;
        for (int turn = 0; tiles.tile(turn, tile); ++turn) {
          product.multiply<1>(sums, pipeline, state, tile,
                              [&](int) { epilogue.release(pipeline); });
          epilogue.store(sums, pipeline, state, tile);
        }
        epilogue.finish();
      });
}
