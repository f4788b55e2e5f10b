// A shared::cluster address with a block rank outside the cluster.
//
// launch: grid=2, block=32
// arg: np.zeros(64, np.float32)
// report: out of bounds: rank 7 in a cluster of 2 blocks
#include "common/ptx/cluster.cuh"

extern "C" __global__ void __cluster_dims__(2) shared_address_of_no_block(float* out) {
  __shared__ float value[32];
  value[threadIdx.x] = 1.0f;
  cukit::cluster_arrive();
  cukit::cluster_wait();
  const unsigned other = BROKEN ? 7 : cukit::cluster_rank() ^ 1;
  cukit::store_remote(&value[threadIdx.x], other, 2.0f);  // <- reported
  cukit::cluster_arrive();
  cukit::cluster_wait();
  out[32 * blockIdx.x + threadIdx.x] = value[threadIdx.x];
}
