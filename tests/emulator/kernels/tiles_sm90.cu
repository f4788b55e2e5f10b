// out = a b^T from K-major or MN-major tiles with any swizzle, to test the layouts of SharedTile.
// One output tile; each of two consumer warpgroups computes half of its rows.
// Macros: SWIZZLE 0 none | 1 128 | 2 64 | 3 32 bytes; A_MN, B_MN 0|1 the operand is MN-major: its
//   rows are k; COLUMNS of out, DEPTH of k; STAGED 0|1 the result is stored with TMA.
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/wgmma.cuh"

namespace {

using T = __half;
constexpr auto kSwizzle = static_cast<cukit::OperandSwizzle>(SWIZZLE);
constexpr int kRows = 2 * cukit::kWarpgroupRows;

template <bool Transposed, int Rows>
struct Operand;

template <int Rows>
struct Operand<false, Rows> {
  using Tile = cukit::SharedTile<T, Rows, DEPTH, kSwizzle>;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kGroup = Tile::rows(cukit::kWarpgroupRows);  // offset of warpgroup 1
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile, int step) {
    return Tile::k_major(tile) + Tile::k_step(step);
  }
};

template <int Rows>
struct Operand<true, Rows> {
  using Tile = cukit::SharedTile<T, DEPTH, Rows, kSwizzle>;
  static constexpr int kSteps = Tile::kRowSteps;
  static constexpr int kGroup = cukit::kWarpgroupRows / Tile::kPartColumns * Tile::kPart;
  CUKIT_DEVICE static unsigned long long descriptor(const unsigned char* tile, int step) {
    return Tile::mn_major(tile) + Tile::mn_step(step);
  }
};

using A = Operand<A_MN, kRows>;
using B = Operand<B_MN, COLUMNS>;
using Block = cukit::WarpSpecialized<2, 40>;
using Store = cukit::StagedStore<T, COLUMNS, 64, COLUMNS / 64>;

static_assert(A::kSteps == B::kSteps, "both are DEPTH deep");

}  // namespace

extern "C" __global__ void __launch_bounds__(Block::kThreads, 1) tile_product(
    const __grid_constant__ cukit::TensorMap a,    // [128, DEPTH] or [DEPTH, 128]
    const __grid_constant__ cukit::TensorMap b,    // [COLUMNS, DEPTH] or [DEPTH, COLUMNS]
    const __grid_constant__ cukit::TensorMap map,  // of out
    T* out) {                                      // [128, COLUMNS]
  __shared__ cukit::Pipeline<1> pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, a_tile);
  unsigned char* const b_tile = a_tile + A::Tile::kBytes;
  unsigned char* const pieces = b_tile + B::Tile::kBytes;
  const cukit::PipelineState<1> at;
  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        if (threadIdx.x != 0) return;
        pipeline.acquire(at);
        cukit::Mbarrier* const full = pipeline.expect(at, A::Tile::kBytes + B::Tile::kBytes);
        A::Tile::load(a_tile, &a, full, 0, 0);
        B::Tile::load(b_tile, &b, full, 0, 0);
      },
      [&] {
        const int group = Block::consumer_group();
        const int first_row = group * cukit::kWarpgroupRows;
        float sums[COLUMNS / 2];
        pipeline.wait(at);
        cukit::wgmma_fence();
#pragma unroll
        for (int step = 0; step < A::kSteps; ++step) {
          cukit::wgmma<T, COLUMNS, A_MN, B_MN>(sums, A::descriptor(a_tile, step) + group * A::kGroup,
                                               B::descriptor(b_tile, step), step > 0);
        }
        cukit::wgmma_commit();
        cukit::wgmma_wait<0>(sums);
        pipeline.release(at);
        if (STAGED) {
          Store::store(sums, pieces + group * Store::kBytes, &map, 0, first_row, COLUMNS, kRows,
                       1 + group);
          Store::finish();
        } else {
          const int row = first_row + cukit::accumulator_row();
          cukit::write_rows<false>(sums, cukit::ResultRows<T>{{1.0f, 1.0f}, {true, true},
                                                              out + row * COLUMNS, COLUMNS, COLUMNS});
        }
      });
}
