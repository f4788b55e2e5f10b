// The consumers' next tile of queries (flash_attention_sm90, attention_kl_sm90).
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/forward_pipelines_sm90.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace {

namespace consumer {

// Sets `work` to the consumer's next tile of queries and waits until its Q is loaded; false if none
// is left. Dynamic schedule: the producer stores the work with the stage of Q. Static schedule:
// every warp computes the work itself, while the stores of its previous results are in flight.
CUKIT_DEVICE bool next_work(QueryWork& work, Pipelines& pipelines, int consumer,
                            const QueryState& q_state,
                            cukit::QueryTileScheduler<kTileM, TILE_N>& scheduler) {
  cukit::Pipeline<QUERY_STAGES>& queries = pipelines.q[consumer];
#if DYNAMIC_SCHEDULE
  queries.wait(q_state);
  __syncwarp();  // converged: the compiler then treats values read by all lanes as warp-uniform
  work = pipelines.work[q_state.index];
  __syncwarp();  // all lanes have read the work before one of them releases the stage
#else
  if (!scheduler.next(work)) return false;
#endif
  work.keys = {cukit::warp_uniform(work.keys.begin), cukit::warp_uniform(work.keys.end),
               cukit::warp_uniform(work.keys.unmasked_begin),
               cukit::warp_uniform(work.keys.unmasked_end)};
  if (!WINDOW) work.keys.begin = work.keys.unmasked_begin = 0;
#if DYNAMIC_SCHEDULE
  return work.keys.end > 0;
#else
  scheduler.make_warp_uniform();
  queries.wait(q_state);
  return true;
#endif
}

}  // namespace consumer

}  // namespace
