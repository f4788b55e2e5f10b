// A block stores to its neighbour's shared memory while the neighbour still reads the old value.
//
// launch: grid=2, block=32
// arg: np.zeros(2, np.float32)
// result: np.array([1, 1])
// report: race
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) remote_store_over_what_is_read(float* out) {
  __shared__ float slot;
  const int rank = cukit::cluster_rank();
  if (threadIdx.x == 0) slot = 0.0f;
  cukit::cluster_arrive();
  cukit::cluster_wait();
  const float before = slot;
#if !BROKEN
  cukit::cluster_arrive();
  cukit::cluster_wait();
#endif
  if (threadIdx.x == 0) cukit::store_remote(&slot, 1 - rank, 1.0f);
  cukit::cluster_arrive();
  cukit::cluster_wait();
  if (threadIdx.x == 0) out[rank] = slot + before;
}
