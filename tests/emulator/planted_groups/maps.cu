// Races between blocks that share an array through a tensor map, with -DBUG=1. Blocks of 128
// threads; boxes of 64 rows of 64 16-bit elements.
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

namespace {

CUKIT_DEVICE void fill(unsigned* tile) {
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = blockIdx.x;
  cukit::fence_proxy_async();
  __syncthreads();
}

}  // namespace

// Blocks store boxes that overlap.
extern "C" __global__ void stores_that_overlap(const __grid_constant__ cukit::TensorMap map) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  fill(tile);
  if (threadIdx.x == 0) {
    cukit::tma_store_2d(&map, tile, 0, (BUG ? 32 : 64) * blockIdx.x);
    cukit::bulk_commit();
    cukit::bulk_wait<0>();
  }
}

// A block loads data that another one stores, without synchronisation between them.
extern "C" __global__ void load_of_what_another_block_stores(
    const __grid_constant__ cukit::TensorMap map) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  __shared__ cukit::Mbarrier full;
  if (blockIdx.x == 0) {
    fill(tile);
    if (threadIdx.x == 0) {
      cukit::tma_store_2d(&map, tile, 0, 0);
      cukit::bulk_commit();
      cukit::bulk_wait<0>();
    }
    return;
  }
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
    cukit::mbarrier_arrive_expect(&full, 8192);
    cukit::tma_load_2d(tile, &map, &full, 0, BUG ? 0 : 64);
  }
  __syncthreads();
  cukit::mbarrier_wait(&full, 0);
}
