// What the consumers of flash_attention_sm90 work on: the next tile of queries.
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

// The next work and its queries, which have come; false if there is none. Work that is dealt lies
// beside them; else every warp finds it by itself, while its results are on their way out.
CUKIT_DEVICE bool next_work(QueryWork& work, Pipelines& pipelines, int group, const QueryState& at,
                            cukit::QueryTileScheduler<kTileM, TILE_N>& queue) {
  cukit::Pipeline<QUERY_STAGES>& queries = pipelines.q[group];
#if DYNAMIC_SCHEDULE
  queries.wait(at);
  __syncwarp();  // together from here on: what lanes then share is the warp's, for the compiler too
  work = pipelines.work[at.index];
  __syncwarp();  // all have read it before one of them gives the stage back
#else
  if (!queue.next(work)) return false;
#endif
  work.keys = {cukit::warp_uniform(work.keys.begin), cukit::warp_uniform(work.keys.end),
               cukit::warp_uniform(work.keys.unmasked_begin), cukit::warp_uniform(work.keys.unmasked_end)};
  if (!WINDOW) work.keys.begin = work.keys.unmasked_begin = 0;
#if DYNAMIC_SCHEDULE
  return work.keys.end > 0;
#else
  queue.share();
  queries.wait(at);
  return true;
#endif
}

}  // namespace consumer

}  // namespace
