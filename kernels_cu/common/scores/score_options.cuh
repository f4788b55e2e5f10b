// Score options of attention, applied between Q K^T and the softmax, and masks.
//
//   score(i, j) = scale * q_i k_j;  SOFTCAP: c tanh(score / c);
//   ALIBI: - slope |i + causal_offset - j|;  BIAS: + bias(i, j);
//   then -infinity where key j is masked for query i
//   causal_offset = seq_kv - seq_q: the ends of both sequences are aligned.
//   CAUSAL: keys j <= i + causal_offset are visible.
//   WINDOW: keys i + causal_offset - left <= j <= i + causal_offset + right are visible.
//   MASK: keys are masked where mask(i, j) is false.
//   SINKS: one more key per head, visible to every query, with a given score and a value of zero.
//   VARLEN: sequence b is rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of one concatenated array.
//
// Options are applied to one score at a time, given its row and column, so they do not depend on
// how a kernel lays out its scores. An option whose macro is 0 costs nothing.
//
// Units: where kScoresModified, score() takes the unscaled product q k and returns the score times
// log2(e). Otherwise score() returns the product unchanged, and the softmax scales it in the
// exponential. exponent_factor() returns the factor that the softmax applies.
//
// Macros, 0 where a kernel does not define them: CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, SINKS,
//   VARLEN 0|1; BIAS 0: none, 1: elements of q's type, 2: float32. VALUE_DIM, VALUE_PADDED:
//   HEAD_DIM and PADDED of v and out; by default those of q and k.
#pragma once

#include "common/platform.cuh"
#include "common/scores/parameters.cuh"
#include "common/types.cuh"

#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef MASK
#define MASK 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef VARLEN
#define VARLEN 0
#endif
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#define VALUE_PADDED PADDED
#endif

namespace cukit {

constexpr bool kScoresModified = SOFTCAP || ALIBI || BIAS;

#if BIAS == 2
using bias_t = float;
#else
using bias_t = element_t;
#endif

// Arrays of the options; null where the option's macro is 0.
struct ScoreArrays {
  const float* alibi_slopes;  // [heads_q] or [batch, heads_q]
  const float* sinks;         // [heads_q]
  const bias_t* bias;         // any strides
  const unsigned char* mask;  // any strides
};

// The remaining factor of scores in exp2.
CUKIT_DEVICE float exponent_factor(float scale_log2) {
  return kScoresModified ? 1.0f : scale_log2;
}

// ---- Sequences ----

struct Sequence {
  int first_q, first_kv;  // rows of the concatenated arrays; 0 without VARLEN
  int seq_q, seq_kv;
};

// `seq_q`, `seq_kv`: the lengths of all sequences; not used with VARLEN.
CUKIT_DEVICE Sequence sequence_of(int b, const int* cu_seqlens_q, const int* cu_seqlens_kv,
                                  int seq_q, int seq_kv) {
  if constexpr (VARLEN) {
    const int first_q = cu_seqlens_q[b];
    const int first_kv = cu_seqlens_kv[b];
    return {first_q, first_kv, cu_seqlens_q[b + 1] - first_q, cu_seqlens_kv[b + 1] - first_kv};
  } else {
    return {0, 0, seq_q, seq_kv};
  }
}

// First element of a sequence and head in an array of one float per query and head: [batch, heads,
// seq_q] or, with VARLEN, [heads, total_q].
CUKIT_DEVICE long long row_statistics(int b, int head, int heads, const Sequence& sequence,
                                      const ScoreSettings& settings) {
  if constexpr (VARLEN) {
    return static_cast<long long>(head) * settings.total_q + sequence.first_q;
  } else {
    return (static_cast<long long>(b) * heads + head) * sequence.seq_q;
  }
}

// ---- Masks ----

// Tiles begin .. end - 1 have a visible pair, MASK aside. All pairs are visible in tiles
// unmasked_begin .. unmasked_end - 1, if any.
struct TileRange {
  int begin, end, unmasked_begin, unmasked_end;

  CUKIT_DEVICE bool unmasked(int tile) const {
    return !MASK && tile >= unmasked_begin && tile < unmasked_end;
  }
};

struct Span {
  int begin, end;
};

// The keys visible to a query by length, CAUSAL and WINDOW. `begin` and `end` may be negative.
CUKIT_DEVICE Span visible_keys(int row, int causal_offset, int seq_kv,
                               const ScoreSettings& settings) {
  Span visible{0, seq_kv};
  if (CAUSAL) {
    visible.end = min(visible.end, row + causal_offset + 1);
  } else if (WINDOW) {
    visible.end = min(visible.end, row + causal_offset + settings.window_right + 1);
  }
  if (WINDOW) visible.begin = row + causal_offset - settings.window_left;
  return visible;
}

// The tiles of `Tile` keys visible to queries first_row .. first_row + rows - 1 (rows > 0).
template <int Tile>
CUKIT_DEVICE TileRange key_tiles(int first_row, int rows, int causal_offset, int seq_kv,
                                 const ScoreSettings& settings) {
  const Span first = visible_keys(first_row, causal_offset, seq_kv, settings);
  const Span last = visible_keys(first_row + rows - 1, causal_offset, seq_kv, settings);
  TileRange range;
  range.begin = WINDOW ? max(0, first.begin) / Tile : 0;
  range.end = (max(0, last.end) + Tile - 1) / Tile;
  range.unmasked_begin = WINDOW ? (max(0, last.begin) + Tile - 1) / Tile : 0;
  range.unmasked_end = max(0, first.end) / Tile;
  return range;
}

// The tiles of `Tile` queries that attend to keys first_key .. first_key + keys - 1 (keys > 0).
// Unmasked tiles may have queries beyond the last.
template <int Tile>
CUKIT_DEVICE TileRange query_tiles(int first_key, int keys, int causal_offset, int seq_q,
                                   const ScoreSettings& settings) {
  const int right = CAUSAL ? 0 : settings.window_right;
  const bool bounded_right = CAUSAL || WINDOW;
  const int last_key = first_key + keys - 1;
  TileRange range;
  range.end = (seq_q + Tile - 1) / Tile;
  range.unmasked_end = range.end;
  range.begin =
      bounded_right ? min(range.end, max(0, first_key - causal_offset - right) / Tile) : 0;
  range.unmasked_begin =
      bounded_right ? (max(0, last_key - causal_offset - right) + Tile - 1) / Tile : 0;
  if (WINDOW) {
    const int least = first_key - causal_offset + settings.window_left + 1;
    const int most = last_key - causal_offset + settings.window_left + 1;
    range.end = max(range.begin, min(range.end, (max(0, most) + Tile - 1) / Tile));
    range.unmasked_end = max(0, least) / Tile;
  }
  return range;
}

// ---- One head's scores ----

struct HeadScores {
  const bias_t* bias;
  const unsigned char* mask;
  float slope_log2;  // ALIBI
  int causal_offset, seq_q, seq_kv;

  CUKIT_DEVICE HeadScores(const ScoreArrays& arrays, const ScoreSettings& settings, int b, int head,
                          const Sequence& sequence)
      : bias(nullptr),
        mask(nullptr),
        slope_log2(0.0f),
        causal_offset(sequence.seq_kv - sequence.seq_q),
        seq_q(sequence.seq_q),
        seq_kv(sequence.seq_kv) {
    if constexpr (ALIBI) slope_log2 = arrays.alibi_slopes[b * settings.alibi_batch + head] * kLog2E;
    if constexpr (BIAS) bias = arrays.bias + b * settings.bias_batch + head * settings.bias_head;
    if constexpr (MASK) mask = arrays.mask + b * settings.mask_batch + head * settings.mask_head;
  }

  CUKIT_DEVICE bool exists(int row, int column) const { return row < seq_q && column < seq_kv; }

  // The score of a product without its bias, in log2 units where kScoresModified. Sets `slope` to
  // the derivative of the score with respect to scale * product.
  CUKIT_DEVICE float unbiased_score(float product, int row, int column, float scale_log2,
                                    const ScoreSettings& settings, float& slope) const {
    slope = 1.0f;
    if constexpr (!kScoresModified) return product;
    float value = product * scale_log2;
    if constexpr (SOFTCAP) {
      const float t = 1.0f - __fdividef(2.0f, 1.0f + exp2f(product * settings.cap_inner));
      value = settings.cap_outer * t;
      slope = 1.0f - t * t;
    }
    if constexpr (ALIBI) {
      value = fmaf(-slope_log2, static_cast<float>(abs(row + causal_offset - column)), value);
    }
    return value;
  }

  // The same with bias.
  CUKIT_DEVICE float score(float product, int row, int column, float scale_log2,
                           const ScoreSettings& settings, float& slope) const {
    float value = unbiased_score(product, row, column, scale_log2, settings, slope);
    if constexpr (BIAS) {
      if (exists(row, column)) {
        const bias_t added = bias[row * settings.bias_row + column * settings.bias_column];
        value = fmaf(to_float(added), kLog2E, value);
      }
    }
    return value;
  }

  CUKIT_DEVICE float score(float product, int row, int column, float scale_log2,
                           const ScoreSettings& settings) const {
    float slope;
    return score(product, row, column, scale_log2, settings, slope);
  }

  // Whether a key is masked for a query; `visible` is visible_keys of its row.
  CUKIT_DEVICE bool masked(const Span& visible, int row, int column,
                           const ScoreSettings& settings) const {
    if (column >= visible.end || (WINDOW && column < visible.begin)) return true;
    if constexpr (MASK) {
      return exists(row, column) &&
             mask[row * settings.mask_row + column * settings.mask_column] == 0;
    } else {
      return false;
    }
  }
};

// ---- Sinks ----

// Sets the initial maximum (in the units of the scores) and sum of a row: -infinity and 0 or, with
// a sink, those of the sink, which is processed as the first key. `unit`: the unnormalised
// probability of the maximum. A quad of lanes shares a row; the lane with `counts` adds the sink to
// its sum.
CUKIT_DEVICE void start_row(float& maximum, float& sum, const ScoreArrays& arrays, int head,
                            float scale_log2, bool counts, float unit = 1.0f) {
  maximum = -infinity();
  sum = 0.0f;
  if constexpr (SINKS) {
    const float sink = arrays.sinks[head] * kLog2E;
    if (sink > -infinity()) {
      maximum = __fdividef(sink, exponent_factor(scale_log2));
      sum = counts ? unit : 0.0f;
    }
  }
}

}  // namespace cukit
