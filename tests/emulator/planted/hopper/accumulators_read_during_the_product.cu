// Accumulators of a wgmma are read before wgmma_wait.
//
// launch: block=128, shared=8192
// arg: np.ones(128, np.float32)
// result: np.zeros(128)
// report: wgmma not waited for: read of 4 bytes of an accumulator|wgmma not waited for
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

// Zeroes the tile that is both operands: 64 rows of 128 bytes.
CUKIT_DEVICE void fill(unsigned* tile) {
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;
}

extern "C" __global__ void accumulators_read_during_the_product(float* out) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  fill(tile);
  cukit::fence_proxy_async();
  __syncthreads();
  const auto descriptor = cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  float acc[32];
  cukit::wgmma_fence();
  cukit::wgmma<__half, 64>(acc, descriptor, descriptor, false);
  cukit::wgmma_commit();
#if !BROKEN
  cukit::wgmma_wait<0>(acc);
#endif
  out[threadIdx.x] = acc[0];
#if BROKEN
  cukit::wgmma_wait<0>(acc);
#endif
}
