// The skeleton of a warp-specialised block (sm_90a): a producer warpgroup that issues loads, and
// consumer warpgroups that issue wgmmas.
//
// All threads of a block start with the same number of registers; the producer warpgroup releases
// those it does not need (setmaxnreg), and the consumers take them. setmaxnreg takes effect where
// the kernel has __launch_bounds__(kThreads, BlocksPerSm) and each role is one branch of a single
// if/else: run() is that if/else. With a single consumer and one block per SM, all threads start
// with the maximum number of registers, and setmaxnreg is not used.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/warp_uniform.cuh"

namespace cukit {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = kWarpgroupThreads / kWarpSize;
constexpr int kWarpgroupRows = 64;  // of a wgmma

// `ProducerRegisters`: per thread of the producer warpgroup; a multiple of 8, 24 or more.
template <int Consumers, int ProducerRegisters, int BlocksPerSm = 1>
struct WarpSpecialized {
  static constexpr int kThreads = (Consumers + 1) * kWarpgroupThreads;
  static constexpr int kConsumerWarps = Consumers * kWarpgroupWarps;
  static constexpr int kStartRegisters = 65536 / (kThreads * BlocksPerSm) / 8 * 8;
  static constexpr int kConsumerRegisters =
      (kStartRegisters * (Consumers + 1) - ProducerRegisters) / Consumers / 8 * 8;

  static constexpr bool kMovesRegisters = kStartRegisters < 256;

  static_assert(ProducerRegisters % 8 == 0 && ProducerRegisters >= 24, "as setmaxnreg requires");
  static_assert(ProducerRegisters <= kStartRegisters, "the producer releases registers");
  static_assert(kConsumerRegisters < 256 || !kMovesRegisters, "within a thread's maximum");

  // Runs `init` in one thread. The mbarriers that it initialises are then visible to the block and
  // to TMA, its other writes to the block; with ClusterSize above 1, both to the whole cluster.
  template <int ClusterSize = 1, typename Init>
  CUKIT_DEVICE static void prepare(const Init& init) {
    if (threadIdx.x == 0) {
      init();
      fence_mbarrier_init();
    }
    if constexpr (ClusterSize > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // Every thread of the first warpgroup runs `producer`, all others run `consumer`.
  template <typename Producer, typename Consumer>
  CUKIT_DEVICE static void run(const Producer& producer, const Consumer& consumer) {
    if (threadIdx.x < kWarpgroupThreads) {
      if constexpr (kMovesRegisters) give_registers<ProducerRegisters>();
      producer();
    } else {
      if constexpr (kMovesRegisters) take_registers<kConsumerRegisters>();
      consumer();
    }
  }

  // Index of this consumer warpgroup, 0 .. Consumers - 1.
  CUKIT_DEVICE static int consumer_group() {
    return warp_uniform(threadIdx.x / kWarpgroupThreads) - 1;
  }
};

// A lane's first row among its warpgroup's 64 rows of wgmma accumulators; its second is 8 rows
// below.
CUKIT_DEVICE int accumulator_row(unsigned thread = threadIdx.x) {
  return thread % kWarpgroupThreads / kWarpSize * 16 + thread % kWarpSize / 4;
}

// A lane's first column among every eight columns of wgmma accumulators.
CUKIT_DEVICE int accumulator_column() { return threadIdx.x % 4 * 2; }

}  // namespace cukit
