// Grouped products, each group of rows with its own matrix, on mma.sync: any layout, any alignment.
//
//   RAGGED M   out[r] = f(a[r] b[g]^T) for the rows r of group g; with PARTS 2
//              out[r] = f(a[r] gate[g]^T) * (a[r] up[g]^T), b[g] = (gate[g] | up[g])
//   RAGGED K   out[g] = sum over the rows r of group g of a[r]^T b[r]
//
// Mapping: one block per tile (gemm/dense_tile_sm80.cuh, which documents the other macros). With
//   ragged m, a block finds its tile by bisection of the tile offsets, which it computes on the
//   device; the grid has one extra tile row per group, and blocks without a tile exit.
// Shared memory: that of a tile; with RAGGED M also 4 * (GROUPS + 1) bytes, static.
// Macros: RAGGED M|K (with K: MAJOR_A and MAJOR_B MN, PARTS 1); GROUPS, the maximum number of
//   groups.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/grouped_gemm.py.
#include "common/platform.cuh"
#include "gemm/dense_tile_sm80.cuh"
#include "gemm/groups.cuh"
#include "gemm/parameters.cuh"

using cukit::DenseProduct;
using cukit::Ragged;
using cukit::T;

namespace {

constexpr Ragged kRagged = Ragged::RAGGED;
static_assert(PARTS == 1 || kRagged == Ragged::M, "gate and up are columns of the product");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) grouped_gemm_sm80(
    const T* __restrict__ a,       // [rows, k]; RAGGED K: [rows, m]
    const T* __restrict__ b,       // [groups, PARTS * n, k], MN-major [groups, k, n]; K: [rows, n]
    T* __restrict__ out,           // [rows, n]; RAGGED K: [groups, m, n]
    T* __restrict__ kept,          // [rows, PARTS * n]; only with KEEPS
    const int* __restrict__ ends,  // offsets [groups + 1], or counts [groups]
    const cukit::GroupedDenseParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  __shared__ int starts[GROUPS + 1];
  const cukit::Groups groups{ends, p.longest, p.fixed_capacity != 0};
  const long long n = p.n;
  const int tiles_n = DenseProduct::tiles_n(p.n);
  int index = static_cast<int>(blockIdx.x);
  if constexpr (kRagged == Ragged::M) {
    if (threadIdx.x < cukit::kWarpSize) {
      cukit::count_tiles<GROUPS>(starts, groups, p.groups, TILE_M);
    }
    __syncthreads();
    const int at = index / tiles_n;
    if (at >= starts[p.groups]) return;
    const int group = cukit::group_of_tile(starts, p.groups, at);
    index -= starts[group] * tiles_n;
    const long long row = groups.first_row(group);
    const T* const own = b + group * PARTS * n * p.k;
    T* const keep = KEEPS ? kept + row * PARTS * n : nullptr;
    cukit::compute_tile({a + row * p.k, own, own + n * p.k, nullptr, out + row * n, keep,
                         groups.length(group), p.n, p.k},
                        index, stages);
  } else {
    const int tiles = DenseProduct::tiles_m(p.m) * tiles_n;
    const int group = index / tiles;
    index -= group * tiles;
    const long long row = groups.first_row(group);
    cukit::compute_tile({a + row * p.m, b + row * n, nullptr, nullptr, out + group * p.m * n, nullptr,
                         p.m, p.n, groups.length(group)},
                        index, stages);
  }
}
