// Which tiles of queries a block of a one-dimensional grid works on, one after the other.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct QueryProblem {
  int batch_heads, heads_q, group, seq_q, seq_kv;
};

// One tile of queries of one head.
struct QueryTile {
  int batch_head, first_row;
  int past;            // keys that the first query sees, not counting the ends of the sequence
  int kv_tiles;        // that some query of the tile sees; at least one, if only to be masked
  int unmasked_tiles;  // the first ones: every query sees all of them
};

// Head after head, so that neighbours in time share keys and values. Blocks take every gridDim-th
// tile; causal ones every gridDim-th pair of tiles of a head, the last with the first and so on:
// each pair sees as many keys. `turn` counts a block's tiles from 0; false when there are no more.
template <int TileM, int TileN, bool Causal>
CUKIT_DEVICE bool find_work(QueryTile& work, const QueryProblem& problem, int& turn) {
  const int tiles = (problem.seq_q + TileM - 1) / TileM;
  const int per_head = Causal ? (tiles + 1) / 2 : tiles;
  const int index = (Causal ? turn / 2 : turn) * static_cast<int>(gridDim.x) +
                    static_cast<int>(blockIdx.x);
  if (index >= problem.batch_heads * per_head) return false;
  const int early = index % per_head;
  const int late = tiles - 1 - early;
  const bool first = Causal && turn % 2 == 0;
  const int tile = first ? late : early;
  turn += first && late == early ? 2 : 1;  // the tile in the middle has no partner
  work.batch_head = index / per_head;
  work.first_row = tile * TileM;
  work.past = problem.seq_kv - problem.seq_q + work.first_row + 1;
  const int last = min(TileM, problem.seq_q - work.first_row) - 1;
  const int most = Causal ? min(problem.seq_kv, work.past + last) : problem.seq_kv;
  const int least = Causal ? max(0, min(problem.seq_kv, work.past)) : problem.seq_kv;
  work.kv_tiles = (max(1, most) + TileN - 1) / TileN;
  work.unmasked_tiles = least / TileN;
  return true;
}

}  // namespace cukit
