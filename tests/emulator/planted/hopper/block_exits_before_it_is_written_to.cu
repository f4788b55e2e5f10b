// A block exits while its neighbour still stores to its shared memory.
//
// launch: grid=2, block=32
// arg: np.zeros(2, np.float32)
// result: np.array([1, 1])
// report: has exited|exited
// seeds: 8
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) block_exits_before_it_is_written_to(float* out) {
  __shared__ float slot;
  const int rank = cukit::cluster_rank();
  cukit::cluster_arrive();
  cukit::cluster_wait();
  if (rank == 1 && threadIdx.x == 0) cukit::store_remote(&slot, 0, 1.0f);
#if !BROKEN
  cukit::cluster_arrive();
  cukit::cluster_wait();
#endif
  if (threadIdx.x == 0) out[rank] = 1.0f;
}
