// Dense matrix product on Hopper: persistent blocks, TMA, wgmma.
//
//   out = a b^T
//
// Mapping: the blocks of a persistent grid walk over TILE_M x TILE_N tiles of the result, in groups of
//   `group` rows of tiles (common/hopper/tile_scheduler.cuh). A thread of the first warpgroup loads
//   TILE_K columns of a and b at a time, up to STAGES ahead and across tiles; each of the two consumer
//   warpgroups multiplies half of the tile's rows. While a consumer stores its result, the producer
//   loads the next tile's operands.
// CLUSTER 2: two neighbouring blocks compute tiles one below the other. Each loads its own tile of a and
//   half of their common tile of b, which TMA writes to both. A stage is free when the consumers of both
//   blocks have released it.
// Shared memory, bytes: STAGES * (TILE_M + TILE_N) * TILE_K * 2 + 2 * buffers * 64 * 64 * 2, dynamic:
//   stages (a | b) | 64 x 64 pieces of out, two for each consumer where TILE_N is a multiple of 128, else
//   one; all in rows of 128 bytes, swizzled. Static: two barriers a stage.
// Macros: DTYPE float16|bfloat16; TILE_M 128|256; TILE_N a multiple of 64 up to 256, with
//   TILE_M * TILE_N at most 32768 (the accumulators); STAGES 2..; CLUSTER 1|2; THREADS 384.
// Tensor maps: boxes of [TILE_M, 64] (a), [TILE_N / CLUSTER, 64] (b) and [64, 64] (out), swizzled by 128
//   bytes; they read zeros outside their tensors and write nothing there.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/tile_scheduler.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kConsumers = 2;
constexpr int kTileK = 64;  // 128 bytes: a row of the swizzle
constexpr int kGroupRows = TILE_M / kConsumers;
constexpr int kRowTiles = kGroupRows / cukit::kWarpgroupRows;  // products of a consumer
constexpr int kShare = TILE_N / CLUSTER;                       // rows of b that a block loads

using Block = cukit::WarpSpecialized<kConsumers, 40>;
using TileA = cukit::SharedTile<T, TILE_M, kTileK>;
using TileB = cukit::SharedTile<T, TILE_N, kTileK>;
using Store = cukit::StagedStore<T, TILE_N, 64, TILE_N % 128 == 0 ? 2 : 1>;
using Pipeline = cukit::Pipeline<STAGES>;
using State = cukit::PipelineState<STAGES>;
using Accumulators = float[kRowTiles][TILE_N / 2];

constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;

static_assert(THREADS == Block::kThreads, "a producer and two consumers");
static_assert(TILE_M * TILE_N <= 32768, "accumulators fit into registers");

// The position of a block's tile in the result.
struct Place {
  int m, n;
};

CUKIT_DEVICE Place place_of(const cukit::MatrixTile& tile) {
  const int rank = CLUSTER > 1 ? cukit::cluster_rank() : 0;
  return {(tile.m * CLUSTER + rank) * TILE_M, tile.n * TILE_N};
}

namespace producer {

struct Maps {
  const cukit::TensorMap* a;
  const cukit::TensorMap* b;
};

// One thread.
CUKIT_DEVICE void run(Pipeline& pipeline, unsigned char* stages, const Maps& maps,
                      const cukit::MatrixTiles& tiles, int rows) {
  State at;
  for (int turn = 0;; ++turn) {
    const int index = cukit::static_tile<CLUSTER>(turn);
    if (index >= tiles.count()) break;
    const cukit::MatrixTile tile = tiles.at(index);
    const Place place = place_of(tile);
    // The second block of a cluster may have no rows left; what it multiplies is not stored.
    const int row = place.m < rows ? place.m : 0;
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      unsigned char* const stage = stages + at.index * kStageBytes;
      pipeline.acquire(at);
      cukit::Mbarrier* const full = pipeline.expect(at, kStageBytes);
      TileA::load(stage, maps.a, full, step * kTileK, row);
      if constexpr (CLUSTER > 1) {
        TileB::load_multicast<kShare>(stage + TileA::kBytes, maps.b, full, step * kTileK, place.n,
                                      cukit::cluster_rank() * kShare, (1 << CLUSTER) - 1);
      } else {
        TileB::load(stage + TileA::kBytes, maps.b, full, step * kTileK, place.n);
      }
      at.advance();
    }
  }
}

}  // namespace producer

namespace consumer {

// A warpgroup's rows of one tile. One step's products stay in flight while the next stage is waited
// for; the stage before is then released.
CUKIT_DEVICE void multiply(Accumulators& sums, Pipeline& pipeline, State& at,
                           unsigned long long a_first, unsigned long long b_first, int steps) {
  State done;
  for (int step = 0; step < steps; ++step) {
    const unsigned long long a = a_first + at.index * (kStageBytes / 16);
    const unsigned long long b = b_first + at.index * (kStageBytes / 16);
    pipeline.wait(at);
    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < TileA::kSteps; ++k)
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        cukit::wgmma<T, TILE_N>(sums[tile],
                                a + TileA::rows(tile * cukit::kWarpgroupRows) + TileA::k_step(k),
                                b + TileB::k_step(k), step > 0 || k > 0);
      }
    cukit::wgmma_commit();
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) cukit::wgmma_wait<1>(sums[tile]);
    if (step > 0) pipeline.release_to_cluster<CLUSTER>(done);
    done = at;
    at.advance();
  }
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) cukit::wgmma_wait<0>(sums[tile]);
  pipeline.release_to_cluster<CLUSTER>(done);
}

CUKIT_DEVICE void run(Pipeline& pipeline, const unsigned char* stages, unsigned char* pieces,
                      const cukit::TensorMap* out, const cukit::MatrixTiles& tiles, int rows,
                      int columns) {
  const int group = Block::consumer_group();
  const unsigned long long a_first = TileA::k_major(stages) + group * TileA::rows(kGroupRows);
  const unsigned long long b_first = TileB::k_major(stages + TileA::kBytes);
  State at;
  Accumulators sums;
  for (int turn = 0;; ++turn) {
    const int index = cukit::static_tile<CLUSTER>(turn);
    if (index >= tiles.count()) break;
    const cukit::MatrixTile tile = tiles.at(index);
    const Place place = place_of(tile);
    multiply(sums, pipeline, at, a_first, b_first, tile.end_step - tile.first_step);
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      const int row = place.m + group * kGroupRows + row_tile * cukit::kWarpgroupRows;
      Store::store(sums[row_tile], pieces + group * Store::kBytes, out, place.n, row, columns, rows,
                   1 + group);
    }
  }
  Store::finish();
}

}  // namespace consumer

// A block's shared memory belongs to its cluster until all have come here.
CUKIT_DEVICE void leave_cluster() {
  if constexpr (CLUSTER > 1) {
    __syncwarp();
    cukit::cluster_arrive();
    cukit::cluster_wait();
  }
}

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, 1) matmul_tma_sm90(
    const __grid_constant__ cukit::TensorMap a,    // [m, k]
    const __grid_constant__ cukit::TensorMap b,    // [n, k]
    const __grid_constant__ cukit::TensorMap out,  // [m, n]
    int m, int n,
    int steps,    // ceil(k / TILE_K), at least 1
    int group) {  // rows of tiles (CLUSTER 2: of pairs of tiles) that are walked over together
  __shared__ Pipeline pipeline;
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  unsigned char* const pieces = stages + STAGES * kStageBytes;
  constexpr int kClusterRows = CLUSTER * TILE_M;
  const cukit::MatrixTiles tiles{(m + kClusterRows - 1) / kClusterRows, (n + TILE_N - 1) / TILE_N,
                                 group, steps, 1};

  Block::prepare<CLUSTER>([&] { pipeline.init(CLUSTER * Block::kConsumerWarps); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) producer::run(pipeline, stages, {&a, &b}, tiles, m);
        leave_cluster();
      },
      [&] {
        consumer::run(pipeline, stages, pieces, &out, tiles, m, n);
        leave_cluster();
      });
}
