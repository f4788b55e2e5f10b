// A wgmma reads operands that ordinary stores have written, without a proxy fence.
//
// launch: block=128, shared=8192
// arg: np.ones(128, np.float32)
// result: np.zeros(128)
// report: missing fence.proxy.async: read
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

// Zeroes the tile that is both operands: 64 rows of 128 bytes.
CUKIT_DEVICE void fill(unsigned* tile) {
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;
}

extern "C" __global__ void operands_without_a_proxy_fence(float* out) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  fill(tile);
#if !BROKEN
  cukit::fence_proxy_async();
#endif
  __syncthreads();
  const auto descriptor = cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  float acc[32];
  cukit::wgmma_fence();
  cukit::wgmma<__half, 64>(acc, descriptor, descriptor, false);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(acc);
  out[threadIdx.x] = acc[0];
}
