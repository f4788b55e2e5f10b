// The registers of operand A change while the wgmma may still read them.
//
// launch: block=128, shared=8192
// arg: np.ones(128, np.float32)
// result: np.zeros(128)
// report: wgmma not waited for: write
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

// Zeroes the tile that is both operands: 64 rows of 128 bytes.
CUKIT_DEVICE void fill(unsigned* tile) {
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;
}

extern "C" __global__ void register_operand_overwritten(float* out) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  fill(tile);
  cukit::fence_proxy_async();
  __syncthreads();
  const auto descriptor = cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  float acc[32];
  unsigned a[4] = {0, 0, 0, 0};
  cukit::wgmma_fence();
  cukit::wgmma<__half, 64>(acc, a, descriptor, false);
  cukit::wgmma_commit();
#if !BROKEN
  cukit::wgmma_wait<0>(acc);
#endif
  for (int i = 0; i < 4; ++i) a[i] = threadIdx.x;
#if BROKEN
  cukit::wgmma_wait<0>(acc);
#endif
  out[threadIdx.x] = a[0] + acc[0] - static_cast<float>(threadIdx.x);
}
