// Cooperative groups.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;
using namespace cooperative_groups;

__device__ int reduce_sum(cg::thread_block_tile<16> g, int* temp, int val) {
  for (int i = g.size() / 2; i > 0; i /= 2) val += g.shfl_down(val, i);
  return val;
}

__global__ void tile_sums(const int* in, int* out) {
  auto tile = cg::tiled_partition<16>(cg::this_thread_block());
  int sum = reduce_sum(tile, nullptr, in[blockIdx.x * blockDim.x + threadIdx.x]);
  if (tile.thread_rank() == 0) out[blockIdx.x * tile.meta_group_size() + tile.meta_group_rank()] = sum;
}

__global__ void block_sum(const float* in, float* out) {
  __shared__ float partial[8];
  thread_block block = this_thread_block();
  thread_block_tile<32> tile32 = tiled_partition<32>(block);
  float sum = cg::reduce(tile32, in[block.thread_rank()], cg::plus<float>());
  if (tile32.thread_rank() == 0) partial[tile32.meta_group_rank()] = sum;
  cg::sync(block);
  if (block.thread_rank() == 0) {
    float total = 0;
    for (int i = 0; i < tile32.meta_group_size(); ++i) total += partial[i];
    *out = total;
  }
}

__device__ int atomicAggInc(int* ctr) {
  auto g = coalesced_threads();
  int warp_res;
  if (g.thread_rank() == 0) warp_res = atomicAdd(ctr, g.size());
  return g.shfl(warp_res, 0) + g.thread_rank();
}

__global__ void filter_aggregated(int* dst, int* nres, const int* src, int n) {
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i >= n) return;
  if (src[i] > 0) dst[atomicAggInc(nres)] = src[i];
}

__global__ void tile_scan(const int* in, int* inclusive, int* exclusive) {
  auto tile = tiled_partition<8>(this_thread_block());
  int i = this_thread_block().thread_rank();
  inclusive[i] = cg::inclusive_scan(tile, in[i], cg::plus<int>());
  exclusive[i] = cg::exclusive_scan(tile, in[i]);
}

__global__ void even_odd(const int* in, int* out) {
  auto warp = tiled_partition<32>(this_thread_block());
  int v = in[threadIdx.x];
  auto part = cg::binary_partition(warp, v % 2 == 0);
  out[threadIdx.x] = cg::reduce(part, v, cg::plus<int>());
}

// A grid-wide sum, then a division by it: two phases.
__global__ void grid_normalize(float* x, float* sum, int n) {
  grid_group grid = this_grid();
  float mine = 0;
  for (int i = grid.thread_rank(); i < n; i += grid.size()) mine += x[i];
  atomicAdd(sum, mine);
  grid.sync();
  float total = *sum;
  for (int i = grid.thread_rank(); i < n; i += grid.size()) x[i] /= total;
}

__global__ void staged_copy(const int* in, int* out, int tiles) {
  extern __shared__ int stage[];
  auto block = this_thread_block();
  for (int t = 0; t < tiles; ++t) {
    cg::memcpy_async(block, stage, in + t * block.size(), sizeof(int) * block.size());
    cg::wait(block);
    out[t * block.size() + threadIdx.x] = stage[block.size() - 1 - threadIdx.x];
    block.sync();
  }
}

__global__ void tile_votes(const int* in, unsigned int* out) {
  auto tile = tiled_partition<4>(this_thread_block());
  int v = in[threadIdx.x];
  out[threadIdx.x] = tile.ballot(v > 0) | tile.any(v > 5) << 8 | tile.all(v > 0) << 9 | tile.shfl_xor(v, 1) << 16;
}
