// The reader of an st.async waits at a cluster barrier, but only the mbarrier signals that the bytes arrived.
//
// launch: grid=2, block=32, shared=16
// arg: np.zeros(2, np.float32)
// result: np.array([1, 0])
// report: asynchronous copy not waited for|uninitialised|race
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) asynchronous_remote_store_not_waited_for(float* out) {
  CUKIT_DYNAMIC_SHARED(float4, from_other);  // one float4
  __shared__ cukit::Mbarrier full;
  const int rank = cukit::cluster_rank();
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
    cukit::mbarrier_arrive_expect(&full, 16);
  }
  cukit::cluster_arrive();
  cukit::cluster_wait();
  if (threadIdx.x == 0) {
    const float value = static_cast<float>(rank);
    cukit::store_async_remote(from_other, 1 - rank, make_float4(value, value, value, value), &full);
  }
#if BROKEN
  cukit::cluster_arrive();
  cukit::cluster_wait();
#else
  cukit::mbarrier_wait(&full, 0);
#endif
  if (threadIdx.x == 5) out[rank] = from_other->y;
  cukit::cluster_arrive();
  cukit::cluster_wait();
}
