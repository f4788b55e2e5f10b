// All score options applied to a warp's sixteen rows of mma.sync accumulators: element
// 4 n + 2 half + i of a lane is row lane / 4 + 8 half, column 8 n + 2 (lane % 4) + i.
#pragma once

#include "common/platform.cuh"
#include "common/scores/fragment_matrix.cuh"
#include "common/scores/fragment_scores.cuh"
#include "common/scores/score_options.cuh"

namespace cukit {

// `unmasked`: TileRange::unmasked of the tile. `crosses_last_key`: the tile has columns beyond the
// last key. Both are warp-uniform.
template <int N>
CUKIT_DEVICE void apply_options(float (&scores)[N], const FragmentPlace& at, const HeadScores& head,
                                float scale_log2, const ScoreSettings& settings, bool unmasked,
                                bool crosses_last_key) {
  if constexpr (kScoresModified) {
    if (BIAS && (crosses_last_key ||
                 !rows_are_aligned(head.bias, settings.bias_row, settings.bias_column))) {
      modify_scores<true>(scores, at, head, scale_log2, settings);
    } else {
      modify_scores<false>(scores, at, head, scale_log2, settings);
      if constexpr (BIAS) add_rows(scores, head.bias, settings.bias_row, at, head.seq_q);
    }
  }
  if (MASK && (crosses_last_key ||
               !rows_are_aligned(head.mask, settings.mask_row, settings.mask_column))) {
    mask_scores(scores, at, [&](int row, int column) {
      const Span visible = visible_keys(row, head.causal_offset, head.seq_kv, settings);
      return head.masked(visible, row, column, settings);
    });
  } else if (!unmasked) {
    if constexpr (MASK) mask_rows(scores, head.mask, settings.mask_row, at, head.seq_q);
    mask_keys(scores, at, head.causal_offset, head.seq_kv, settings);
  }
}

// A row of 16x8 accumulator tiles as one array.
template <int Tiles>
CUKIT_DEVICE float (&flat(float (&row)[Tiles][4]))[4 * Tiles] {
  return reinterpret_cast<float(&)[4 * Tiles]>(row);
}

}  // namespace cukit
