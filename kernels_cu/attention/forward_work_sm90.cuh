// What the consumers of flash_attention_sm90 work on: the next tile of queries, and the tiles of keys
// that a warpgroup's share of them sees.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/forward_producer_sm90.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace {

namespace consumer {

// The next work and its queries, which have come; false if there is none. Work that is dealt lies
// beside them; else every warp finds it by itself, while its results are on their way out.
CUKIT_DEVICE bool next_work(QueryWork& work, Pipelines& pipelines, const QueryState& at,
                            cukit::WorkQueue<kTileM, TILE_N>& queue) {
#if DEALT
  pipelines.q.wait(at);
  __syncwarp();  // together from here on: what lanes then share is the warp's, for the compiler too
  work = pipelines.work[at.index];
  __syncwarp();  // all have read it before one of them gives the stage back
#else
  if (!queue.next(work)) return false;
#endif
  work.keys = {cukit::warp_uniform(work.keys.begin), cukit::warp_uniform(work.keys.end),
               cukit::warp_uniform(work.keys.whole_begin), cukit::warp_uniform(work.keys.whole_end)};
  if (!WINDOW) work.keys.begin = work.keys.whole_begin = 0;
#if DEALT
  return work.keys.end > 0;
#else
  queue.share();
  pipelines.q.wait(at);
  return true;
#endif
}

// Whether the warpgroups of a block see different keys.
constexpr bool kUneven = (CAUSAL || WINDOW) && !BLOCK_SPARSE;

// The tiles of keys that a warpgroup's 64 queries see, one at least. All warpgroups go through those
// of the work; at either end some may be hidden from it. One without queries has nothing to look at.
CUKIT_DEVICE cukit::TileRange own_keys(const QueryWork& work, int first_row, int past,
                                       const cukit::ScoreSettings& settings) {
  const cukit::Sequence& sequence = work.sequence;
  cukit::TileRange seen = work.keys;
  const int rows = min(cukit::kWarpgroupRows, sequence.seq_q - first_row);
  if (rows <= 0) {
    seen.end = work.keys.begin + 1;
  } else if (kUneven) {
    seen = cukit::key_tiles<TILE_N>(first_row, rows, past, sequence.seq_kv, settings);
    seen.end = max(work.keys.begin + 1, min(seen.end, work.keys.end));
    seen.begin = min(max(seen.begin, work.keys.begin), seen.end - 1);
  }
  return {WINDOW ? cukit::warp_uniform(seen.begin) : 0, cukit::warp_uniform(seen.end),
          WINDOW ? cukit::warp_uniform(seen.whole_begin) : 0, cukit::warp_uniform(seen.whole_end)};
}

}  // namespace consumer

}  // namespace
