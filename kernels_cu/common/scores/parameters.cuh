// Structs that all kernels with attention scores take by value.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts
// agree.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// Strides of an array [batch, seq, heads, columns], columns contiguous, in elements.
struct HeadStrides {
  long long batch, row, head;
};

// Options of the scores (score_options.cuh). Strides in elements.
struct ScoreSettings {
  long long bias_batch, bias_head, bias_row, bias_column;
  long long mask_batch, mask_head, mask_row, mask_column;
  int window_left, window_right;
  int alibi_batch;  // stride of the slopes between batches
  int total_q;      // VARLEN: rows of all sequences of q
  float cap_inner;  // 2 log2(e) scale / softcap
  float cap_outer;  // log2(e) softcap
};

CUKIT_DEVICE long long offset_of(const HeadStrides& strides, int b, int row, int head) {
  return b * strides.batch + row * strides.row + head * strides.head;
}

}  // namespace cukit
