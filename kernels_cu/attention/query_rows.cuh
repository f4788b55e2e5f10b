// dS with queries as rows, for the kernels that compute dQ alone.
//
// Scores are in the layout of fragment_scores.cuh.
//
// DISTILL: dS is the difference of two models' probabilities (attention_kl_sm80.cu).
//
// Macros: those of score_options.cuh and scratch_rows.cuh; DISTILL, 0 where it is not defined.
#pragma once

#include "attention/scratch_rows.cuh"
#include "common/platform.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/scores/score_options.cuh"

#ifndef DISTILL
#define DISTILL 0
#endif

namespace cukit {

// The statistics of a lane's two rows.
struct QueryRows {
  const HeadScores& head;
  const ScoreSettings& settings;
  float scale_log2;
  float lse[2], delta[2];

  // `first`: scratch row of the sequence's first query; `row`: the lane's first row.
  CUKIT_DEVICE QueryRows(const HeadScores& head, const ScoreSettings& settings, float scale_log2,
                         const float* lse_log2, const float* deltas, long long first, int row)
      : head(head), settings(settings), scale_log2(scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = row + 8 * half < head.seq_q;
      lse[half] = exists ? lse_log2[first + row + 8 * half] : infinity();
      delta[half] = exists ? deltas[first + row + 8 * half] : DISTILL ? infinity() : 0.0f;
    }
  }

  // Turns products into weights: P, with SOFTCAP times the softcap's derivative. `unmasked`,
  // `crosses_last_key` as in apply_options.
  template <int N>
  CUKIT_DEVICE void exponentiate(float (&scores)[N], const FragmentPlace& at, bool unmasked,
                                 bool crosses_last_key) const {
    if constexpr (SOFTCAP) {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const int row = at.row + 8 * (e / 2 % 2), column = at.column + 8 * (e / 4) + e % 2;
        float slope;
        const float value = head.score(scores[e], row, column, scale_log2, settings, slope);
        const Span visible = visible_keys(row, head.causal_offset, head.seq_kv, settings);
        const bool masked = !unmasked && head.masked(visible, row, column, settings);
        scores[e] = masked ? 0.0f : exp2f(value - lse[e / 2 % 2]) * slope;
      }
    } else {
      apply_options(scores, at, head, scale_log2, settings, unmasked, crosses_last_key);
      const float factor = exponent_factor(scale_log2);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        scores[e] = exp2f(fmaf(scores[e], factor, -lse[e / 2 % 2]));
      }
    }
  }

#if DISTILL
  // Turns the teacher's products into its probabilities; delta is its lse.
  template <int N>
  CUKIT_DEVICE void exponentiate_teacher(float (&scores)[N], const FragmentPlace& at, bool unmasked,
                                         bool crosses_last_key, float teacher_scale_log2) const {
    apply_options(scores, at, head, teacher_scale_log2, settings, unmasked, crosses_last_key);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      scores[e] = exp2f(fmaf(scores[e], teacher_scale_log2, -delta[e / 2 % 2]));
    }
  }

  // Element e of dS.
  CUKIT_DEVICE float gradient(float weight, float teacher, int) const { return weight - teacher; }
#else
  // Element e of dS.
  CUKIT_DEVICE float gradient(float weight, float dp, int e) const {
    return weight * (dp - delta[e / 2 % 2]);
  }
#endif
};

}  // namespace cukit
