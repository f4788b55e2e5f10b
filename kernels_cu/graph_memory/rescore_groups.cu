// Scores of a query with the 32 rows of each of its selected groups, bitwise equal to the scores
// that group_maxima.cu computes and discards: both run the same tensor-core products in the same
// order.
//
// Mapping: grid (num_queries, ceil(k / warps)); one warp per group. The warp copies the group's
//   rows to its own tile of shared memory. The query is the first row of the left operand; the
//   other rows are zero.
// Shared memory: (THREADS / 32) * 32 * WIDTH * 2 bytes, dynamic.
// Macros: DTYPE float16|bfloat16; WIDTH: dim rounded up to a multiple of 64; THREADS. Minimum
//   architecture: sm_80. Deterministic.
// Reference: cukit/reference/graph_memory.py, retrieve_top_k.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "graph_memory/parameters.cuh"
#include "graph_memory/score_key.cuh"

namespace {

using T = cukit::element_t;
using cukit::Key;
using cukit::kWarpSize;

constexpr int kGroup = 32;
constexpr int kWarps = THREADS / kWarpSize;
constexpr int kSteps = WIDTH / 16;
constexpr int kChunks = WIDTH / 8;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) rescore_groups(
    const T* __restrict__ queries,   // [num_queries, dim]
    const T* __restrict__ memory,    // [num_rows, dim]
    const Key* __restrict__ groups,  // [num_queries, k]: keys of maxima and group indices
    Key* __restrict__ keys,          // [num_queries, k, 32]: keys of scores and row indices
    const __grid_constant__ cukit::RetrieveParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tiles);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int slot = blockIdx.y * kWarps + warp;
  const long long query = blockIdx.x;
  if (slot >= p.k) return;
  const Key group = groups[query * p.k + slot];
  Key* to = keys + (query * p.k + slot) * kGroup;
  if (group == 0) {
    to[lane] = 0;
    return;
  }
  const int first = static_cast<int>(cukit::index_of_key(group)) * kGroup;
  const unsigned tile = cukit::shared_address(tiles) + warp * (kGroup * WIDTH * 2);
  const T* from = memory + static_cast<long long>(first) * p.dim;
#pragma unroll 8
  for (int i = lane; i < kGroup * kChunks; i += kWarpSize) {
    const int row = i / kChunks, chunk = i % kChunks;
    cukit::cp_async_16(tile + cukit::Swizzle<WIDTH>::offset(row, chunk),
                       from + static_cast<long long>(row) * p.dim + chunk * 8,
                       first + row < p.num_rows && chunk * 8 < p.dim);
  }
  cukit::cp_async_commit();
  cukit::cp_async_wait<0>();
  __syncwarp();

  float acc[1][kGroup / 8][4];
  cukit::clear(acc);
  const cukit::RightNK<WIDTH> rows(tile, 0, 0);
  const T* own = queries + query * p.dim;
  cukit::warp_product<T, kSteps>(
      acc,
      [&](unsigned(&r)[4], int, int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = 16 * k + 2 * (lane % 4) + 8 * (i / 2);
          const bool inside = i % 2 == 0 && lane < 4 && column < p.dim;
          r[i] = inside ? *reinterpret_cast<const unsigned*>(own + column) : 0u;
        }
      },
      [&](unsigned(&r)[4], int n, int k) { rows(r, 8 * n, 16 * k); });
  if (lane < 4) {
#pragma unroll
    for (int n = 0; n < kGroup / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + 2 * lane + i;
        to[row] = first + row < p.num_rows
                      ? cukit::key_of_score(acc[0][n][i], static_cast<unsigned>(first + row))
                      : 0;
      }
  }
}
