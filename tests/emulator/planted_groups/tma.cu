// Bugs in the use of TMA, mbarriers and proxy fences. Each function contains one bug if `planted`
// is true, and is correct otherwise. Blocks of 128 threads; a tile of 64 x 64 float16 with a
// swizzle of 128 bytes.
//
// Each function copies the tile to out: 64 * 32 words, in the order of shared memory.
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kTileBytes = 64 * 128;

struct Shared {
  cukit::Mbarrier full;
  cukit::Mbarrier empty;
};

struct Arguments {
  const cukit::TensorMap* map;
  Shared& shared;
  unsigned char* tile;
  unsigned* out;
  bool planted;
};

// Called by one thread.
CUKIT_DEVICE void start_load(const Arguments& all) {
  cukit::mbarrier_arrive_expect(&all.shared.full, kTileBytes);
  cukit::tma_load_2d(all.tile, all.map, &all.shared.full, 0, 0);
}

CUKIT_DEVICE void load(const Arguments& all, unsigned parity = 0) {
  if (threadIdx.x == 0) start_load(all);
  cukit::mbarrier_wait(&all.shared.full, parity);
}

CUKIT_DEVICE void store(const Arguments& all) {
  for (int i = threadIdx.x; i < kTileBytes / 4; i += kThreads) {
    all.out[i] = reinterpret_cast<const unsigned*>(all.tile)[i];
  }
}

CUKIT_DEVICE void init(Shared& shared, bool visible) {
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&shared.full, 1);
    cukit::mbarrier_init(&shared.empty, kThreads);
    if (visible) cukit::fence_mbarrier_init();
  }
}

// TMA overwrites what ordinary stores wrote.
CUKIT_DEVICE void missing_proxy_fence_before_a_load(const Arguments& all) {
  reinterpret_cast<unsigned*>(all.tile)[threadIdx.x] = 0;
  if (!all.planted) cukit::fence_proxy_async();
  __syncthreads();
  load(all);
  store(all);
}

// The thread that starts the copy may execute the fence for all threads, after their stores; another
// thread may not.
CUKIT_DEVICE void proxy_fence_of_another_thread(const Arguments& all) {
  reinterpret_cast<unsigned*>(all.tile)[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == (all.planted ? 1 : 0)) cukit::fence_proxy_async();
  load(all);
  store(all);
}

// A copy overwrites a tile that ordinary loads have read: this needs no proxy fence, but readers must
// arrive at `empty` after their loads, and the thread that starts the copy must wait on it.
CUKIT_DEVICE void overwritten_before_it_was_read(const Arguments& all) {
  load(all);
  if (all.planted) cukit::mbarrier_arrive(&all.shared.empty);
  store(all);
  if (!all.planted) cukit::mbarrier_arrive(&all.shared.empty);
  if (threadIdx.x == 0) {
    cukit::mbarrier_wait(&all.shared.empty, 0);
    start_load(all);
  }
  cukit::mbarrier_wait(&all.shared.full, 1);
  store(all);
}

// A copy overwrites an operand that wgmma still reads.
CUKIT_DEVICE void operand_overwritten_by_a_copy(const Arguments& all) {
  load(all);
  float sums[32];
  const auto operand = cukit::matrix_descriptor(all.tile, cukit::OperandSwizzle::Bytes128, 16, 1024);
  cukit::wgmma_fence();
  cukit::wgmma<__half, 64>(sums, operand, operand, false);
  cukit::wgmma_commit();
  if (!all.planted) cukit::wgmma_wait<0>(sums);
  cukit::mbarrier_arrive(&all.shared.empty);
  if (threadIdx.x == 0) {
    cukit::mbarrier_wait(&all.shared.empty, 0);
    start_load(all);
  }
  cukit::wgmma_wait<0>(sums);
  cukit::mbarrier_wait(&all.shared.full, 1);
  store(all);
}

// If planted, planted_tma initialises the mbarriers without fence_mbarrier_init.
CUKIT_DEVICE void missing_mbarrier_fence(const Arguments& all) {
  load(all);
  store(all);
}

}  // namespace

#define BUGS(X) \
  X(missing_proxy_fence_before_a_load) \
  X(proxy_fence_of_another_thread) \
  X(overwritten_before_it_was_read) \
  X(operand_overwritten_by_a_copy) \
  X(missing_mbarrier_fence)

#define NUMBER(name) k_##name,
enum Bug { BUGS(NUMBER) };
#undef NUMBER

extern "C" __global__ void planted_tma(const __grid_constant__ cukit::TensorMap map, int bug,
                                       int planted, unsigned* out) {
  __shared__ Shared shared;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  init(shared, bug != k_missing_mbarrier_fence || !planted);
  __syncthreads();
  const Arguments all{&map, shared, tile, out, planted != 0};
  switch (bug) {
#define CASE(name) \
  case k_##name: return name(all);
    BUGS(CASE)
#undef CASE
  }
}

// Two blocks: each loads and reads the tile, then its threads arrive at `empty` of both blocks; the
// first block then loads the tile again, by a multicast to both.
// `bug`: 0 none | 1 `empty`, at which the other block arrives, is initialised without a fence |
// 2 the arrivals are relaxed, though ordinary loads have read the tile.
extern "C" __global__ void __cluster_dims__(2, 1, 1) planted_cluster(
    const __grid_constant__ cukit::TensorMap map, int bug, unsigned* out) {
  __shared__ Shared shared;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  init(shared, true);
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&shared.empty, 2 * kThreads);
    if (bug != 1) cukit::fence_mbarrier_init();
  }
  cukit::cluster_arrive();
  cukit::cluster_wait();
  const int rank = cukit::cluster_rank();
  const Arguments all{&map, shared, tile, out + rank * kTileBytes / 4, false};
  load(all);
  store(all);
  for (int other = 0; other < 2; ++other) {
    if (bug == 2) {
      cukit::mbarrier_arrive_remote_relaxed(&shared.empty, other);
    } else {
      cukit::mbarrier_arrive_remote(&shared.empty, other);
    }
  }
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&shared.full, kTileBytes);
    cukit::mbarrier_wait(&shared.empty, 0);
    if (rank == 0) cukit::tma_load_2d_multicast(tile, &map, &shared.full, 0, 0, 3);
  }
  cukit::mbarrier_wait(&shared.full, 1);
  store(all);
  cukit::cluster_arrive();
  cukit::cluster_wait();
}

// out [8 rows, 8 columns] = the box of float32 at coordinates (x, 0, z, w), innermost axis first.
extern "C" __global__ void read_box(const __grid_constant__ cukit::TensorMap map, int x, int z, int w,
                                    unsigned* out) {
  __shared__ Shared shared;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  init(shared, true);
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&shared.full, 256);
    cukit::tma_load_4d(tile, &map, &shared.full, x, 0, z, w);
  }
  cukit::mbarrier_wait(&shared.full, 0);
  if (threadIdx.x < 64) out[threadIdx.x] = reinterpret_cast<const unsigned*>(tile)[threadIdx.x];
}
