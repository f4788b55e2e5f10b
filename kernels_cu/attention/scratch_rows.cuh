// Row indices of the backward's scratch arrays, which hold float32 values for each query of each
// head.
//
// A head has `rows_per_head` rows, a multiple of SCRATCH_TILE. The layout is [batch, heads,
// rows_per_head], where row r is query r, or with VARLEN [heads, rows_per_head], where sequence b
// starts at row cu_seqlens_q[b] + b * SCRATCH_TILE, rounded down to a multiple of SCRATCH_TILE.
// Each sequence then has room for its queries, rounded up to full tiles.
//
// Macros: SCRATCH_TILE, default TILE_M; VARLEN (score_options.cuh).
#pragma once

#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

#ifndef SCRATCH_TILE
#define SCRATCH_TILE TILE_M
#endif

namespace cukit {

CUKIT_DEVICE int scratch_start(int b, int first_q) {
  return VARLEN ? (first_q / SCRATCH_TILE + b) * SCRATCH_TILE : 0;
}

// The scratch row of a sequence's first query.
CUKIT_DEVICE long long scratch_row(int b, int head, int heads, int rows_per_head, int first_q) {
  const int index = VARLEN ? head : b * heads + head;
  return static_cast<long long>(index) * rows_per_head + scratch_start(b, first_q);
}

// The sequence, head and query of a scratch row. `query` may be beyond the sequence.
struct ScratchPlace {
  int b, head, query;
  int first_q, seq_q;  // of the sequence
};

CUKIT_DEVICE ScratchPlace scratch_place(long long row, int batch, int heads, int seq_q,
                                        int rows_per_head, const int* cu_seqlens_q) {
  const int index = static_cast<int>(row / rows_per_head);
  const int within = static_cast<int>(row % rows_per_head);
  if constexpr (VARLEN) {
    int b = 0;  // the last sequence that starts at or before this row
    for (int end = batch; end - b > 1;) {
      const int middle = (b + end) / 2;
      if (scratch_start(middle, cu_seqlens_q[middle]) <= within) {
        b = middle;
      } else {
        end = middle;
      }
    }
    const int first_q = cu_seqlens_q[b];
    return {b, index, within - scratch_start(b, first_q), first_q, cu_seqlens_q[b + 1] - first_q};
  } else {
    return {index / heads, index % heads, within, 0, seq_q};
  }
}

}  // namespace cukit
