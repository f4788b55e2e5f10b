// Misuse of TMA, mbarriers, wgmma and clusters, with -DBUG=1. One block of 128 threads; a tile
// of 64 x 64 16-bit elements, in rows of 128 bytes.
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace {

constexpr int kTileBytes = 64 * 128;

CUKIT_DEVICE void load_tile(unsigned char* tile, const cukit::TensorMap* map,
                            cukit::Mbarrier* barrier) {
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(barrier, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(barrier, kTileBytes);
    cukit::tma_load_2d(tile, map, barrier, 0, 0);
  }
}

// out = tile * tile^T, [64, 64]
CUKIT_DEVICE void multiply(const unsigned char* tile, float* out, cukit::OperandSwizzle swizzle) {
  float acc[32];
  cukit::wgmma_fence();
  for (int k = 0; k < 128; k += 32) {
    const auto descriptor = cukit::matrix_descriptor(tile + k, swizzle, 16, 1024);
    cukit::wgmma<__half, 64>(acc, descriptor, descriptor, k > 0);
  }
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(acc);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int i = 0; i < 32; ++i) {
    out[(row + 8 * (i / 2 % 2)) * 64 + 8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2] = acc[i];
  }
}

}  // namespace

extern "C" __global__ void missing_mbarrier_wait(const __grid_constant__ cukit::TensorMap map,
                                                 float* out) {
  __shared__ cukit::Mbarrier barrier;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  load_tile(tile, &map, &barrier);
#if !BUG
  cukit::mbarrier_wait(&barrier, 0);
#endif
  multiply(tile, out, cukit::OperandSwizzle::Bytes128);
}

// The tensor map has a 128-byte swizzle.
extern "C" __global__ void wrong_swizzle(const __grid_constant__ cukit::TensorMap map, float* out) {
  __shared__ cukit::Mbarrier barrier;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  load_tile(tile, &map, &barrier);
  cukit::mbarrier_wait(&barrier, 0);
  multiply(tile, out, BUG ? cukit::OperandSwizzle::Bytes64 : cukit::OperandSwizzle::Bytes128);
}

// Overwrites an operand while the wgmma may still read it.
extern "C" __global__ void operand_reused_too_early(const __grid_constant__ cukit::TensorMap map,
                                                    float* out) {
  __shared__ cukit::Mbarrier barrier;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  load_tile(tile, &map, &barrier);
  cukit::mbarrier_wait(&barrier, 0);
  float acc[32];
  cukit::wgmma_fence();
  const auto descriptor = cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  cukit::wgmma<__half, 64>(acc, descriptor, descriptor, false);
  cukit::wgmma_commit();
#if !BUG
  cukit::wgmma_wait<0>(acc);
  __syncthreads();
#endif
  reinterpret_cast<float*>(tile)[threadIdx.x] = 0.0f;
#if BUG
  cukit::wgmma_wait<0>(acc);
#endif
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = acc[i];
}

// Writes a tile with ordinary stores, then stores it to global memory with TMA.
extern "C" __global__ void missing_proxy_fence(const __grid_constant__ cukit::TensorMap map) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  for (int i = threadIdx.x; i < kTileBytes / 4; i += 128) {
    reinterpret_cast<unsigned*>(tile)[i] = 0;
  }
#if !BUG
  cukit::fence_proxy_async();
#endif
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::tma_store_2d(&map, tile, 0, 0);
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}

extern "C" __global__ void exit_before_the_store_has_read(
    const __grid_constant__ cukit::TensorMap map) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  for (int i = threadIdx.x; i < kTileBytes / 4; i += 128) {
    reinterpret_cast<unsigned*>(tile)[i] = 0;
  }
  cukit::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::tma_store_2d(&map, tile, 0, 0);
    cukit::bulk_commit();
#if !BUG
    cukit::bulk_wait_read<0>();
#endif
  }
}

// Expects more bytes than the copy delivers.
extern "C" __global__ void mbarrier_never_completes(const __grid_constant__ cukit::TensorMap map,
                                                    float* out) {
  __shared__ cukit::Mbarrier barrier;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&barrier, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&barrier, kTileBytes + 16 * BUG);
    cukit::tma_load_2d(tile, &map, &barrier, 0, 0);
  }
  cukit::mbarrier_wait(&barrier, 0);
  multiply(tile, out, cukit::OperandSwizzle::Bytes128);
}

// A cluster of two blocks of 64 threads: each block sends its rank to the other.
extern "C" __global__ void __cluster_dims__(2, 1, 1) missing_cluster_barrier(float* out) {
  __shared__ float from_other;
  const int rank = cukit::cluster_rank();
  cukit::cluster_arrive();
  cukit::cluster_wait();
  if (threadIdx.x == 0) cukit::store_remote(&from_other, 1 - rank, static_cast<float>(rank));
#if !BUG
  cukit::cluster_arrive();
  cukit::cluster_wait();
#endif
  if (threadIdx.x == 5) out[rank] = from_other;
}
