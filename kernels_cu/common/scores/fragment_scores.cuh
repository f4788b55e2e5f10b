// Score options applied to a warp's scores, in the layout of online_softmax.cuh.
#pragma once

#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

namespace cukit {

// Position of a lane's scores in the sequence: element 4 n + 2 half + i is row `row` + 8 half,
// column `column` + 8 n + i.
struct FragmentPlace {
  int row, column;
};

// Turns products into scores: softcap, ALiBi and, if Biased, bias.
template <bool Biased, int N>
CUKIT_DEVICE void modify_scores(float (&scores)[N], const FragmentPlace& at, const HeadScores& head,
                                float scale_log2, const ScoreSettings& settings) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int row = at.row + 8 * (e / 2 % 2);
    const int column = at.column + 8 * (e / 4) + e % 2;
    if (Biased && e % 8 == 0) __syncwarp();  // limits loads in flight, to save registers
    float slope;
    scores[e] = Biased ? head.score(scores[e], row, column, scale_log2, settings, slope)
                       : head.unbiased_score(scores[e], row, column, scale_log2, settings, slope);
  }
}

// Sets scores to -infinity where the key is masked by the sequence's end, CAUSAL or WINDOW.
template <int N>
CUKIT_DEVICE void mask_keys(float (&scores)[N], const FragmentPlace& at, int causal_offset,
                            int seq_kv, const ScoreSettings& settings) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Span visible = visible_keys(at.row + 8 * half, causal_offset, seq_kv, settings);
    const int end = visible.end - at.column;
    const int begin = visible.begin - at.column;
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i >= end || (WINDOW && 8 * n + i < begin)) {
          scores[4 * n + 2 * half + i] = -infinity();
        }
      }
  }
}

// Sets scores to -infinity where masked(row, column) is true. The results are first collected as
// bits, in a loop that limits the loads in flight: scores and outputs leave few registers.
template <int N, typename Masked>
CUKIT_DEVICE void mask_scores(float (&scores)[N], const FragmentPlace& at, const Masked& masked) {
#pragma unroll
  for (int first = 0; first < N; first += 32) {
    const int count = N - first < 32 ? N - first : 32;
    unsigned bits = 0;
#pragma unroll 4
    for (int e = 0; e < count; ++e) {
      const int row = at.row + 8 * (e / 2 % 2);
      const int column = at.column + 2 * first + 8 * (e / 4) + e % 2;
      bits |= static_cast<unsigned>(masked(row, column)) << e;
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < count; ++e) {
      if (bits >> e & 1) scores[first + e] = -infinity();
    }
  }
}

}  // namespace cukit
