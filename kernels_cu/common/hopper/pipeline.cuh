// Pipelines: stages of shared memory that a producer fills and consumers read, guarded by mbarriers
// (sm_90).
//
//   Pipeline<3> pipeline;                  // __shared__; one thread: pipeline.init(consumer_warps)
//   PipelineState<3> state;                // in registers of everyone who walks along
//
//   producer                                            consumer, a warp
//     pipeline.acquire(state);                            pipeline.wait(state);
//     Mbarrier* full = pipeline.expect(state, bytes);     ... reads stage state.index ...
//     ... starts copies that report to `full` ...         pipeline.release(state);
//     state.advance();                                    state.advance();
//
// A stage that ordinary stores fill is handed over by commit() in place of expect(); where wgmma or
// TMA reads those stores, fence_proxy_async() comes first.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/opaque.cuh"

namespace cukit {

// A position in a pipeline: the stage, and the phase of its barriers in this round.
template <int Stages>
struct PipelineState {
  int index = 0;
  unsigned phase = 0;

  CUKIT_DEVICE void advance() {
    if (++index == Stages) {
      index = 0;
      phase ^= 1;
    }
  }
};

// One mbarrier a stage: an event that happens once a round. With one stage: an event that repeats, or
// one that happens once.
template <int Stages>
struct StageBarriers {
  Mbarrier stage[Stages];

  using State = PipelineState<Stages>;

  // One thread, before fence_mbarrier_init and a barrier of the block (or cluster). `arrivals`: of
  // threads, in one round.
  CUKIT_DEVICE void init(int arrivals) {
    for (int index = 0; index < Stages; ++index) mbarrier_init(&stage[index], arrivals);
  }

  // Waits for the event of the round that `at` is in.
  CUKIT_DEVICE void wait(const State& at) { mbarrier_wait(&stage[at.index], at.phase); }

  // Waits for the event of the round before; in the first round there is nothing to wait for.
  CUKIT_DEVICE void wait_previous(const State& at) {
    mbarrier_wait(&stage[at.index], at.phase ^ 1);
  }

  // As wait, but not before `value`, which is never below -1, is computed. The compiler moves a wait
  // up past arithmetic that was to run beside what is awaited; this keeps it down.
  CUKIT_DEVICE void wait_after(const State& at, float value) {
    mbarrier_wait(&stage[at.index], ordered_after(at.phase, value));
  }

  CUKIT_DEVICE void arrive(const State& at) { mbarrier_arrive(&stage[at.index]); }

  // One arrival for the warp. Its lanes' accesses come before it where a warp-wide operation (a
  // wgmma, a shuffle, __syncwarp) stands in between.
  CUKIT_DEVICE void arrive_warp(const State& at) {
    if (threadIdx.x % kWarpSize == 0) arrive(at);
  }

  // Arrives and announces `bytes` of copies, which are to report to the barrier that is returned.
  CUKIT_DEVICE Mbarrier* expect(const State& at, unsigned bytes) {
    mbarrier_arrive_expect(&stage[at.index], bytes);
    return &stage[at.index];
  }
};

template <int Stages>
struct Pipeline {
  StageBarriers<Stages> full;   // the stage holds its data
  StageBarriers<Stages> empty;  // all consumers have read it

  using State = PipelineState<Stages>;

  // One thread, as StageBarriers::init. Arrivals a round: of consumers, one a warp; of producers, one
  // for each expect or commit.
  CUKIT_DEVICE void init(int consumer_arrivals, int producer_arrivals = 1) {
    for (int index = 0; index < Stages; ++index) {
      mbarrier_init(&full.stage[index], producer_arrivals);
      mbarrier_init(&empty.stage[index], consumer_arrivals);
    }
  }

  // ---- Producer ----

  // Waits until the consumers have released what the stage held before.
  CUKIT_DEVICE void acquire(const State& at) { empty.wait_previous(at); }

  CUKIT_DEVICE Mbarrier* expect(const State& at, unsigned bytes) { return full.expect(at, bytes); }

  CUKIT_DEVICE void commit(const State& at) { full.arrive(at); }

  // ---- Consumer ----

  CUKIT_DEVICE void wait(const State& at) { full.wait(at); }

  CUKIT_DEVICE void wait_after(const State& at, float value) { full.wait_after(at, value); }

  // The warp has read the stage. Accesses by wgmma have ended when wgmma_wait says so.
  CUKIT_DEVICE void release(const State& at) { empty.arrive_warp(at); }

  // The same towards every block of a cluster of `Blocks`, whose copies fill this block's stage too. The
  // stage has been read by wgmma alone.
  template <int Blocks>
  CUKIT_DEVICE void release_to_cluster(const State& at) {
    if constexpr (Blocks == 1) {
      release(at);
    } else {
      const int lane = threadIdx.x % kWarpSize;
      if (lane < Blocks) mbarrier_arrive_remote_relaxed(&empty.stage[at.index], lane);
    }
  }

  // The same of a stage to which the warp's lanes have written, too.
  template <int Blocks>
  CUKIT_DEVICE void release_changed_to_cluster(const State& at) {
    if constexpr (Blocks > 1) {
      __syncwarp();
      const int lane = threadIdx.x % kWarpSize;
      if (lane < Blocks) mbarrier_arrive_remote(&empty.stage[at.index], lane);
    } else {
      release(at);
    }
  }

  // Passes over a stage that the warp has no use for. The wait is necessary: until the stage is full,
  // others may still read what it held before, and the warp is counted once a round.
  CUKIT_DEVICE void skip(State& at) {
    wait(at);
    __syncwarp();  // else a lane could wait for this round when the next one has ended
    release(at);
    at.advance();
  }
};

}  // namespace cukit
