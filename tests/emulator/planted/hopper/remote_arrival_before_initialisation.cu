// A block arrives at its neighbour's mbarrier without waiting until the mbarrier is initialised.
//
// launch: grid=2, block=32
// arg: np.zeros(2, np.float32)
// result: np.array([1, 1])
// report: mbarrier|race|uninitialised
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) remote_arrival_before_initialisation(float* out) {
  __shared__ cukit::Mbarrier ready;
  const int rank = cukit::cluster_rank();
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&ready, 1);
    cukit::fence_mbarrier_init();
  }
#if BROKEN
  __syncthreads();
#else
  cukit::cluster_arrive();
  cukit::cluster_wait();
#endif
  if (threadIdx.x == 0) cukit::mbarrier_arrive_remote(&ready, 1 - rank);
  cukit::mbarrier_wait_cluster(&ready, 0);
  if (threadIdx.x == 0) out[rank] = 1.0f;
  cukit::cluster_arrive();
  cukit::cluster_wait();
}
