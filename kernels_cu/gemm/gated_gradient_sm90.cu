// The gradient with respect to the preactivation of a gated linear layer, through the linear layer
// after it, on Hopper: a dense product whose epilogue is the activation's gradient.
//
//   h = grad_out w                          the gradient of the gated layer's result
//   grad = [h up f'(gate) | h f(gate)]      z = [gate | up]; f: ReLU, GELU, SiLU
//
// h is never stored: it stays in float accumulators.
//
// Mapping: persistent blocks compute TILE_M x TILE_N tiles of h. A thread of the first warpgroup
//   loads both operands in k steps of 64, a thread of its second warp loads z. With ALTERNATING the
//   two consumer warpgroups compute alternate tiles, each a whole tile: one runs its epilogue while
//   the other multiplies. Otherwise each computes half of every tile's rows, and both run their
//   epilogues between two main loops.
//   The epilogue processes parts of 64 x 64 elements of h: it overwrites gate and up in shared
//   memory with their gradients, which TMA stores. Once TMA has read a part, the same part of the
//   next tile's z is loaded into its buffer.
// Shared memory, dynamic: STAGES * (TILE_M + TILE_N) * 128 bytes of operands a | b, then a buffer
//   of 16 KB, gate | up, for each part of a tile, by rows, then columns. Static: two barriers per
//   stage and per part, one for the order of the main loops.
// Barriers: a part's buffer is filled once per tile of the block (turn), so the phase of its
//   barriers is the parity of the turn. Alternating consumers use a buffer every second turn,
//   always with the same parity: before a consumer waits for the buffer to be full, it waits until
//   the other consumer has released the buffer in the turn before.
// Macros: DTYPE float16|bfloat16; TILE_M, TILE_N 128; STAGES; THREADS 384; ALTERNATING 0|1;
//   ACTIVATION Relu|GeluErf|GeluTanh|Silu.
// Tensor maps: grad_out boxes [TILE_M, 64]; w, z and grad boxes [64, 64]; swizzled in rows of 128
//   bytes. Rows outside read as zeros and are not written; n is a multiple of TILE_N.
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

constexpr int kConsumers = 2;
constexpr int kRowConsumers = ALTERNATING ? 1 : kConsumers;  // that divide a tile's rows
using Shape = cukit::GemmShape<T, TILE_M, TILE_N, 1, kRowConsumers, Major::K, Major::MN>;
using Block = cukit::WarpSpecialized<kConsumers, 40>;

using Part = cukit::SharedTile<T, kWarpgroupRows, 64>;  // gate or up, then its gradient
constexpr int kColumnParts = TILE_N / Part::kColumns;
constexpr int kParts = TILE_M / Part::kRows * kColumnParts;
constexpr int kPartBytes = 2 * Part::kBytes;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(TILE_N % Part::kColumns == 0 && Part::kParts == 1, "a part is one box");

// The operands of produce() for z: step `part` of a tile fills buffer `part`.
struct Preactivation {
  static constexpr int kStageBytes = kPartBytes;
  const cukit::TensorMap* z;
  int rows, columns;  // of h

  // A part without rows is loaded from row 0, and not stored.
  CUKIT_DEVICE void load(unsigned char* buffer, cukit::Mbarrier* full, const Tile& tile,
                         int part) const {
    const int row = Shape::row(tile) + part / kColumnParts * Part::kRows;
    const int column = Shape::column(tile) + part % kColumnParts * Part::kColumns;
    const int first = row < rows ? row : 0;
    Part::load(buffer, z, full, column, first);
    Part::load(buffer + Part::kBytes, z, full, columns + column, first);
  }
};

struct Epilogue {
  cukit::Pipeline<kParts>* z;
  unsigned char* buffers;
  const cukit::TensorMap* grad;
  int rows, columns;  // of h
  int consumer;
  unsigned phase;     // of the tile's parts

  template <typename Sums>
  CUKIT_DEVICE void store(const Sums& sums, const Tile& tile) {
    const int first = ALTERNATING ? 0 : consumer;  // 64-row tile of sums[0]
    cukit::PipelineState<kParts> before;
    // Ensures that the first thread has released the buffers of this consumer's previous tile;
    // otherwise another thread's wait for the release in the turn before could return early.
    if constexpr (ALTERNATING) cukit::named_sync(1 + consumer, kWarpgroupThreads);
#pragma unroll
    for (int index = 0; index < Shape::kRowTiles * kColumnParts; ++index) {
      const int row_tile = index / kColumnParts, part = index % kColumnParts;
      const cukit::PipelineState<kParts> state{first * kColumnParts + index, phase};
      unsigned char* const buffer = buffers + state.index * kPartBytes;
      if constexpr (ALTERNATING) z->acquire(state);
      z->wait(state);
      differentiate(sums[row_tile], part, buffer);
      cukit::fence_proxy_async();
      cukit::named_sync(1 + consumer, kWarpgroupThreads);  // the gradients are written
      if (threadIdx.x % kWarpgroupThreads == 0) {
        store_part(buffer, Shape::column(tile) + part * Part::kColumns,
                   Shape::row(tile) + (first + row_tile) * Part::kRows);
        if (index > 0) {
          cukit::bulk_wait_read<1>();
          z->release(before);
        }
      }
      before = state;
    }
    if (threadIdx.x % kWarpgroupThreads == 0) {
      cukit::bulk_wait_read<0>();
      z->release(before);
    }
    if constexpr (!ALTERNATING) phase ^= 1;
  }

  CUKIT_DEVICE void finish() const {}

 private:
  // Replaces gate and up of a part by their gradients. `outer`: this lane's accumulators of 64 rows
  // of h.
  template <int N>
  CUKIT_DEVICE void differentiate(const float (&outer)[N], int part, unsigned char* buffer) const {
    constexpr int kBlocks = Part::kColumns / 16;
    const int lane = threadIdx.x % cukit::kWarpSize;
    const int row = threadIdx.x % kWarpgroupThreads / cukit::kWarpSize * 16 + lane % 16;
    unsigned at[kBlocks][2], packed[kBlocks][2][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        at[block][up] = Part::address(cukit::shared_address(buffer) + up * Part::kBytes, row,
                                      2 * block + lane / 16);
        cukit::ldmatrix_x4(packed[block][up], at[block][up]);
      }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float gate[2], up[2];
        cukit::unpack<T>(gate, packed[block][0][j]);
        cukit::unpack<T>(up, packed[block][1][j]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float h = outer[8 * (part * kBlocks + block) + 2 * j + i];
          float slope;
          const float value = Activation::value_and_slope(gate[i], &slope);
          gate[i] = h * up[i] * slope;
          up[i] = h * value;
        }
        packed[block][0][j] = cukit::pack<T>(gate[0], gate[1]);
        packed[block][1][j] = cukit::pack<T>(up[0], up[1]);
      }
#pragma unroll
      for (int up = 0; up < 2; ++up) cukit::stmatrix_x4(at[block][up], packed[block][up]);
    }
  }

  // One thread. Commits even an empty group, so that bulk_wait_read counts parts.
  CUKIT_DEVICE void store_part(const unsigned char* buffer, int column, int row) const {
    if (row < rows) {
      cukit::tma_store_2d(grad, buffer, column, row);
      cukit::tma_store_2d(grad, buffer + Part::kBytes, columns + column, row);
    }
    cukit::bulk_commit();
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
  __shared__ cukit::Pipeline<kParts> parts;
  __shared__ cukit::StageBarriers<1> issued;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  unsigned char* const buffers = stages + STAGES * Shape::kStageBytes;
  const auto schedule = [&](int steps) {
    return cukit::DenseTiles<>{
        {(p.m + TILE_M - 1) / TILE_M, p.n / TILE_N, p.raster_group, steps, 1}};
  };
  Block::prepare([&] {
    pipeline.init(kRowConsumers * cukit::kWarpgroupWarps);
    parts.init(1);
    issued.init(cukit::kWarpgroupWarps);
  });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          const cukit::DenseOperands<Shape> operands{&grad_out, &w, p.m, p.n};
          cukit::produce(pipeline, stages, schedule(p.steps), operands);
        } else if (threadIdx.x == cukit::kWarpSize) {
          cukit::produce(parts, buffers, schedule(kParts), Preactivation{&z, p.m, p.n});
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        Epilogue epilogue{&parts, buffers, &grad, p.m, p.n, consumer,
                          ALTERNATING ? static_cast<unsigned>(consumer) : 0u};
        if constexpr (ALTERNATING) {
          const cukit::SharedProduct<Shape> product(stages, 0);
          cukit::consume_alternating(pipeline, issued, consumer, schedule(p.steps), product,
                                     epilogue);
        } else {
          const cukit::SharedProduct<Shape> product(stages, consumer);
          cukit::consume(pipeline, schedule(p.steps), product, epilogue);
        }
      });
}
