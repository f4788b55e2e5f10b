// The highest score of each query in every group of 32 consecutive rows of a memory. Scores are not
// stored.
//
//   maxima[q, g] = max over rows r of group g of <queries[q], memory[r]>
//
// The k best rows are in the k groups with the highest maxima (ties: the lower group), because for
// a row outside these groups the best rows of all k groups are better. So this is the only pass
// over all scores, and its control flow does not depend on them.
//
// Mapping: grid (blocks, query tiles). A block keeps QUERY_WARPS * QUERY_TILES * 16 queries in
//   registers, as tensor-core operands, and iterates over tiles of ROWS rows, prefetched by
//   cp.async STAGES - 1 tiles ahead. The ROW_WARPS warps with the same queries split the groups of
//   a tile. Rows of the memory are columns of the product, so a group's maximum is reduced within a
//   thread first, and then over four lanes.
// Shared memory: STAGES * ROWS * WIDTH * 2 bytes, dynamic.
// Macros: DTYPE float16|bfloat16; WIDTH: dim rounded up to a multiple of 64; QUERY_TILES 1|2|4;
//   QUERY_WARPS 1|2|4; ROW_WARPS; ROWS, a multiple of 32 * ROW_WARPS; STAGES 2..4; THREADS 32 *
//   QUERY_WARPS * ROW_WARPS. QUERY_TILES * WIDTH <= 512, so that the queries fit in registers.
// Minimum architecture: sm_80. Accumulates in float over ascending k; deterministic.
// Reference: cukit/reference/graph_memory.py, retrieve_top_k.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/reduce.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "graph_memory/parameters.cuh"

namespace {

using T = cukit::element_t;
using cukit::kWarpSize;

constexpr int kRows = ROWS;
constexpr int kGroup = 32;
constexpr int kSteps = WIDTH / 16;
constexpr int kGroups = kRows / kGroup / ROW_WARPS;  // per warp and tile
constexpr int kTileBytes = kRows * WIDTH * 2;
constexpr int kQueries = QUERY_WARPS * QUERY_TILES * 16;
static_assert(QUERY_TILES * WIDTH <= 512, "queries fit in registers");
static_assert(THREADS == kWarpSize * QUERY_WARPS * ROW_WARPS, "one warp per part of a tile");
static_assert(kRows % (kGroup * ROW_WARPS) == 0, "full groups");

// Maxima of QUERY_TILES values over four lanes. Each lane returns the maximum of query tile
// `owned`; -1: its result is not used. With four values, lanes exchange halves twice: three
// shuffles instead of eight.
CUKIT_DEVICE float quad_maximum(const float (&values)[QUERY_TILES], int& owned) {
  const int lane = threadIdx.x % kWarpSize;
  const bool odd = lane % 2 != 0, high = lane % 4 >= 2;
  const auto exchange = [](float low, float up, bool takes_up, int distance) {
    const float other = __shfl_xor_sync(cukit::kFullMask, takes_up ? low : up, distance);
    return fmaxf(takes_up ? up : low, other);
  };
  if constexpr (QUERY_TILES == 4) {
    owned = lane % 4;
    const float first = exchange(values[0], values[2], high, 2);
    const float second = exchange(values[1], values[3], high, 2);
    return exchange(first, second, odd, 1);
  } else if constexpr (QUERY_TILES == 2) {
    owned = odd ? -1 : lane % 4 / 2;
    return cukit::warp_reduce<cukit::Max, 2>(exchange(values[0], values[1], high, 2));
  } else {
    owned = lane % 4 == 0 ? 0 : -1;
    return cukit::warp_reduce<cukit::Max, 4>(values[0]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) group_maxima(
    const T* __restrict__ queries,  // [num_queries, dim]
    const T* __restrict__ memory,   // [num_rows, dim]
    float* __restrict__ maxima,     // [num_queries, num_groups]
    const __grid_constant__ cukit::RetrieveParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tiles);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int row_warp = warp / QUERY_WARPS;
  const int first_query = blockIdx.y * kQueries + warp % QUERY_WARPS * (QUERY_TILES * 16);
  const unsigned base = cukit::shared_address(tiles);
  const int num_tiles = (p.num_rows + kRows - 1) / kRows;

  using Tile = cukit::TileCopy<kRows, WIDTH, THREADS, true>;
  const auto start = [&](int tile, int stage) {
    if (tile < num_tiles) {
      const long long row = static_cast<long long>(tile) * kRows;
      Tile::start(base + stage * kTileBytes, memory + row * p.dim, p.dim, p.num_rows - static_cast<int>(row),
                  p.dim);
    }
    cukit::cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) start(blockIdx.x + stage * gridDim.x, stage);

  unsigned a[QUERY_TILES][kSteps][4];
#pragma unroll
  for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = first_query + 16 * m + lane / 4 + 8 * (i % 2);
        const int column = 16 * k + 2 * (lane % 4) + 8 * (i / 2);
        const bool inside = query < p.num_queries && column < p.dim;
        a[m][k][i] = inside ? *reinterpret_cast<const unsigned*>(
                                  queries + static_cast<long long>(query) * p.dim + column)
                            : 0u;
      }

  int stage = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    cukit::cp_async_wait<STAGES - 2>();
    __syncthreads();
    start(tile + (STAGES - 1) * gridDim.x, (stage + STAGES - 1) % STAGES);
    const unsigned at = base + stage * kTileBytes;
    stage = (stage + 1) % STAGES;
#pragma unroll 1
    for (int part = 0; part < kGroups; ++part) {
      const int row = (row_warp * kGroups + part) * kGroup;
      const cukit::RightNK<WIDTH> rows(at, row, 0);
      float acc[QUERY_TILES][kGroup / 8][4];
      cukit::clear(acc);
      cukit::warp_product<T, kSteps>(
          acc,
          [&](unsigned(&r)[4], int m, int k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = a[m][k][i];
          },
          [&](unsigned(&r)[4], int n, int k) { rows(r, 8 * n, 16 * k); });

      const int left = p.num_rows - tile * kRows - row;  // rows from the group's first one on
      if (left <= 0) continue;
      if (left < kGroup) {
#pragma unroll
        for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
          for (int n = 0; n < kGroup / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (8 * n + 2 * (lane % 4) + i % 2 >= left) acc[m][n][i] = -cukit::infinity();
            }
      }
      const int group = (tile * kRows + row) / kGroup;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best[QUERY_TILES];
#pragma unroll
        for (int m = 0; m < QUERY_TILES; ++m) {
          best[m] = -cukit::infinity();
#pragma unroll
          for (int n = 0; n < kGroup / 8; ++n) {
            best[m] = fmaxf(best[m], fmaxf(acc[m][n][2 * half], acc[m][n][2 * half + 1]));
          }
        }
        int owned;  // query tile of this lane's maximum
        const float maximum = quad_maximum(best, owned);
        const int query = first_query + 16 * owned + lane / 4 + 8 * half;
        if (owned >= 0 && query < p.num_queries) {
          maxima[static_cast<long long>(query) * p.num_groups + group] = maximum;
        }
      }
    }
  }
}
