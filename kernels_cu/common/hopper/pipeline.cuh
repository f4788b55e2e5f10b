// Pipelines: stages of shared memory that a producer fills and consumers read, guarded by mbarriers
// (sm_90).
//
//   Pipeline<3> pipeline;                  // __shared__; one thread: pipeline.init(consumer_warps)
//   PipelineState<3> state;                // in registers of the producer and of each consumer
//
//   producer                                            consumer, a warp
//     pipeline.acquire(state);                            pipeline.wait(state);
//     Mbarrier* full = pipeline.expect(state, bytes);     ... reads stage state.index ...
//     ... starts copies that complete at `full` ...       pipeline.release(state);
//     state.advance();                                    state.advance();
//
// For a stage filled by ordinary stores, the producer calls commit() after the stores instead of
// expect(); if wgmma or TMA reads the stage, it calls fence_proxy_async() before commit().
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
  // The same `count` times.
  CUKIT_DEVICE void advance(int count) {
    const int end = index + count;
    index = end % Stages;
    phase ^= end / Stages & 1;
  }
};

// One mbarrier per stage, for an event that happens once per round. With one stage, the event may
// also happen only once.
template <int Stages>
struct StageBarriers {
  Mbarrier stage[Stages];

  using State = PipelineState<Stages>;

  // Called by one thread, before fence_mbarrier_init and a barrier of the block (or cluster).
  // `arrivals`: number of arrivals per round.
  CUKIT_DEVICE void init(int arrivals) {
    for (int index = 0; index < Stages; ++index) mbarrier_init(&stage[index], arrivals);
  }

  // Waits for the event of the round of `state`.
  CUKIT_DEVICE void wait(const State& state) { mbarrier_wait(&stage[state.index], state.phase); }

  // Waits for the event of the previous round; returns at once in the first round.
  CUKIT_DEVICE void wait_previous(const State& state) {
    mbarrier_wait(&stage[state.index], state.phase ^ 1);
  }

  // As wait, but only after `value`, which must not be below -1, has been computed. With wait, the
  // compiler moves the wait above arithmetic that should overlap the awaited event.
  CUKIT_DEVICE void wait_after(const State& state, float value) {
    mbarrier_wait(&stage[state.index], ordered_after(state.phase, value));
  }

  CUKIT_DEVICE void arrive(const State& state) { mbarrier_arrive(&stage[state.index]); }

  // One arrival for the warp. It is ordered after its lanes' accesses if a warp-wide operation (a
  // wgmma, a shuffle, __syncwarp) is in between.
  CUKIT_DEVICE void arrive_warp(const State& state) {
    if (threadIdx.x % kWarpSize == 0) arrive(state);
  }

  // Arrives and announces `bytes` of copies, which must complete at the returned barrier.
  CUKIT_DEVICE Mbarrier* expect(const State& state, unsigned bytes) {
    mbarrier_arrive_expect(&stage[state.index], bytes);
    return &stage[state.index];
  }
};

template <int Stages>
struct Pipeline {
  StageBarriers<Stages> full;   // the stage holds its data
  StageBarriers<Stages> empty;  // all consumers have read it

  using State = PipelineState<Stages>;

  // Called by one thread, as StageBarriers::init. Arrivals per round: one per consumer warp; one
  // per expect() or commit() of the producers.
  CUKIT_DEVICE void init(int consumer_arrivals, int producer_arrivals = 1) {
    for (int index = 0; index < Stages; ++index) {
      mbarrier_init(&full.stage[index], producer_arrivals);
      mbarrier_init(&empty.stage[index], consumer_arrivals);
    }
  }

  // ---- Producer ----

  // Waits until the consumers have released the stage's previous contents.
  CUKIT_DEVICE void acquire(const State& state) { empty.wait_previous(state); }

  CUKIT_DEVICE Mbarrier* expect(const State& state, unsigned bytes) {
    return full.expect(state, bytes);
  }

  CUKIT_DEVICE void commit(const State& state) { full.arrive(state); }

  // ---- Consumer ----

  CUKIT_DEVICE void wait(const State& state) { full.wait(state); }

  CUKIT_DEVICE void wait_after(const State& state, float value) { full.wait_after(state, value); }

  // Call after the warp has read the stage. The wgmmas that read the stage must have been awaited
  // (wgmma_wait).
  CUKIT_DEVICE void release(const State& state) { empty.arrive_warp(state); }

  // The same, to every block of a cluster of `Blocks` blocks, whose copies also fill this block's
  // stage. With Blocks > 1 the arrival is relaxed: only wgmmas may have read the stage.
  template <int Blocks>
  CUKIT_DEVICE void release_to_cluster(const State& state) {
    if constexpr (Blocks == 1) {
      release(state);
    } else {
      const int lane = threadIdx.x % kWarpSize;
      if (lane < Blocks) mbarrier_arrive_remote_relaxed(&empty.stage[state.index], lane);
    }
  }

  // The same for a stage that the warp's lanes have read or written directly.
  template <int Blocks>
  CUKIT_DEVICE void release_changed_to_cluster(const State& state) {
    if constexpr (Blocks > 1) {
      __syncwarp();
      const int lane = threadIdx.x % kWarpSize;
      if (lane < Blocks) mbarrier_arrive_remote(&empty.stage[state.index], lane);
    } else {
      release(state);
    }
  }

  // Skips a stage that the warp does not need. The wait is necessary: until the stage is full,
  // other warps may still read its previous contents, and the warp must arrive once per round.
  CUKIT_DEVICE void skip(State& state) {
    wait(state);
    __syncwarp();  // otherwise a lane could wait for this round after the next one has ended
    release(state);
    state.advance();
  }
};

}  // namespace cukit
