// __syncthreads instead of a cluster barrier: it orders only the threads of a block.
//
// launch: grid=2, block=32
// arg: np.zeros(2, np.float32)
// result: np.array([1, 0])
// report: race|uninitialised|has exited
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) block_barrier_for_the_cluster(float* out) {
  __shared__ float from_other;
  const int rank = cukit::cluster_rank();
  cukit::cluster_arrive();
  cukit::cluster_wait();
  if (threadIdx.x == 0) cukit::store_remote(&from_other, 1 - rank, static_cast<float>(rank));
#if BROKEN
  __syncthreads();
#else
  cukit::cluster_arrive();
  cukit::cluster_wait();
#endif
  if (threadIdx.x == 5) out[rank] = from_other;
}
