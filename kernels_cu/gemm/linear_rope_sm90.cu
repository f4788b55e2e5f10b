// A dense product whose epilogue rotates heads (RoPE), on Hopper: persistent blocks, TMA, wgmma.
//
//   y = x w^T;  in each of the first `rotated` / HEAD_DIM heads of y's columns the pair (a, b) =
//   (y[i], y[i + HEAD_DIM / 2]) becomes (a cos - b sin, b cos + a sin)
//
// Row r of x has position r % period, its row in the tables of cosines and sines. The rotation is
// computed on the accumulators: both elements of a pair belong to one thread.
// Paper: Su et al., "RoFormer", arXiv:2104.09864.
//
// Mapping: as linear_sm90.cu without clusters and splits. A thread loads the cosines and sines of
//   its two rows while the products run, and uses them for all heads of a tile.
// Shared memory, dynamic: STAGES * (TILE_M + TILE_N) * 128 bytes, then the buffers of
//   StagedEpilogue. Static: two barriers per stage.
// Macros: DTYPE float16|bfloat16; TILE_M 128; TILE_N a multiple of HEAD_DIM, at most 256; HEAD_DIM
//   64|128; STAGES; THREADS 384.
// Tensor maps: x boxes [TILE_M, 64], w boxes [TILE_N, 64], y boxes as of StagedEpilogue. n is a
//   multiple of HEAD_DIM.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "common/hopper/gemm.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::Major;

constexpr int kConsumers = 2;
constexpr int kHalf = HEAD_DIM / 2;
using Shape = cukit::GemmShape<T, TILE_M, TILE_N, 1, kConsumers, Major::K, Major::K>;
using Block = cukit::WarpSpecialized<kConsumers, 40>;

static_assert(THREADS == Block::kThreads, "a producer and the consumers");
static_assert(TILE_N % HEAD_DIM == 0 && Shape::kRowTiles == 1, "whole heads");

// A Transform of common/hopper/gemm_epilogue.cuh.
struct Rotation {
  static constexpr int kParts = 1;
  static constexpr bool kKeeps = false;
  const float* cos;  // [period, kHalf]
  const float* sin;
  int period, rotated;
  cukit::Vec<float, 2> cosines[2][kHalf / 8];  // of this lane's rows, 8 apart
  cukit::Vec<float, 2> sines[2][kHalf / 8];

  CUKIT_DEVICE Rotation(const float* cos, const float* sin, int period, int rotated)
      : cos(cos), sin(sin), period(period), rotated(rotated) {}

  CUKIT_DEVICE void begin(int row, int column) {
    if (column >= rotated) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = (row + cukit::accumulator_row() + 8 * half) % period;
      const long long first =
          static_cast<long long>(position) * kHalf + cukit::accumulator_column();
#pragma unroll
      for (int n = 0; n < kHalf / 8; ++n) {
        cukit::load(cosines[half][n], cos + first + 8 * n);
        cukit::load(sines[half][n], sin + first + 8 * n);
      }
    }
  }

  template <int N>
  CUKIT_DEVICE void prepare(float (&)[N], int, int) const {}

  template <int N>
  CUKIT_DEVICE void operator()(float (&acc)[N], int, int column) const {
#pragma unroll
    for (int head = 0; head < TILE_N / HEAD_DIM; ++head) {
      if (column + head * HEAD_DIM >= rotated) return;
#pragma unroll
      for (int n = 0; n < kHalf / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = head * kHalf + 4 * n + 2 * half + i;
            const float a = acc[at], b = acc[at + kHalf / 2];
            const float c = cosines[half][n][i], s = sines[half][n][i];
            acc[at] = a * c - b * s;
            acc[at + kHalf / 2] = b * c + a * s;
          }
    }
  }
};

using Epilogue = cukit::StagedEpilogue<Shape, T, Rotation>;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_rope_sm90(const __grid_constant__ cukit::TensorMap x,  // [m, k]
                     const __grid_constant__ cukit::TensorMap w,  // [n, k]
                     const __grid_constant__ cukit::TensorMap y,  // [m, n]
                     const float* __restrict__ cos,               // [period, HEAD_DIM / 2]
                     const float* __restrict__ sin,               // [period, HEAD_DIM / 2]
                     const cukit::RotatedParameters parameters) {
  const cukit::GemmParameters& p = parameters.gemm;
  __shared__ cukit::Pipeline<STAGES> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  const cukit::DenseTiles<> schedule{
      {(p.m + TILE_M - 1) / TILE_M, (p.n + TILE_N - 1) / TILE_N, p.raster_group, p.steps, 1}};
  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
          const cukit::DenseOperands<Shape> operands{&x, &w, p.m, p.n};
          cukit::produce(pipeline, stages, schedule, operands);
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        const cukit::SharedProduct<Shape> product(stages, consumer);
        Epilogue epilogue{stages + STAGES * Shape::kStageBytes, &y, p.m, p.n, consumer,
                          {cos, sin, parameters.period, parameters.rotated}};
        cukit::consume(pipeline, schedule, product, epilogue);
      });
}
