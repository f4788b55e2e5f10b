// Two groups are in flight; accumulators of the newer group are read after a wait for the older one.
//
// launch: block=128, shared=8192
// arg: np.ones(128, np.float32)
// result: np.zeros(128)
// report: wgmma not waited for
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

// Zeroes the tile that is both operands: 64 rows of 128 bytes.
CUKIT_DEVICE void fill(unsigned* tile) {
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;
}

extern "C" __global__ void waits_for_the_older_group_alone(float* out) {
  CUKIT_DYNAMIC_SHARED(unsigned, tile);
  fill(tile);
  cukit::fence_proxy_async();
  __syncthreads();
  const auto descriptor = cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  float first[32], second[32];
  cukit::wgmma_fence();
  cukit::wgmma<__half, 64>(first, descriptor, descriptor, false);
  cukit::wgmma_commit();
  cukit::wgmma<__half, 64>(second, descriptor, descriptor, false);
  cukit::wgmma_commit();
  cukit::wgmma_wait<BROKEN ? 1 : 0>(second);
  out[threadIdx.x] = second[0];
#if BROKEN
  cukit::wgmma_wait<0>(first);
#endif
  out[threadIdx.x] += first[0];
}
