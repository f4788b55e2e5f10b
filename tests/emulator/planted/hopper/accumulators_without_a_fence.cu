// Ordinary code sets the accumulators and no wgmma.fence follows.
//
// launch: block=128, shared=8192
// arg: np.ones(128, np.float32)
// result: np.zeros(128)
// report: missing wgmma|wgmma_fence|missing fence
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

// Zeroes the tile that is both operands: 64 rows of 128 bytes.
CUKIT_DEVICE void fill(unsigned* tile) {
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;
}

extern "C" __global__ void accumulators_without_a_fence(float* out) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  fill(tile);
  cukit::fence_proxy_async();
  __syncthreads();
  const auto descriptor = cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  float acc[32];
#if BROKEN
  cukit::wgmma_fence();
#endif
  for (int i = 0; i < 32; ++i) acc[i] = 0.0f;
#if !BROKEN
  cukit::wgmma_fence();
#endif
  cukit::wgmma<__half, 64>(acc, descriptor, descriptor, true);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(acc);
  out[threadIdx.x] = acc[0];
}
