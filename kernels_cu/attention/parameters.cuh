// What the kernels of attention take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
// Lengths: of all sequences or, with VARLEN, of the longest.
#pragma once

#include "common/scores/parameters.cuh"

namespace cukit {

// flash_attention_sm80
struct ForwardParameters {
  HeadStrides q, k, v, out;
  int batch, heads_q;
  int group;  // query heads that share a key head
  int seq_q, seq_kv;
  int head_dim, value_dim;
  int section;       // heads whose blocks run together (block_order.cuh)
  float scale_log2;  // scale * log2(e)
  ScoreSettings settings;
};

// flash_attention_backward_sm80
struct KeyGradientParameters {
  HeadStrides q, k, v, grad_out;
  int batch;
  int heads;   // blocks that share a key head count as heads of their own
  int group;   // query heads of each
  int splits;  // blocks that share a key head
  int seq_q, seq_kv;
  int rows_per_head;  // of the scratch arrays (scratch_rows.cuh)
  int head_dim, value_dim;
  int section;
  float scale, scale_log2;
  ScoreSettings settings;
};

// flash_attention_backward_sm90, which finds its arrays through tensor maps
struct MappedKeyParameters {
  int batch;
  int heads;   // blocks that share a key head count as heads of their own
  int group;   // query heads of each
  int splits;  // blocks that share a key head
  int seq_q, seq_kv;
  int rows_per_head;  // of the scratch arrays (scratch_rows.cuh)
  int head_dim, value_dim;
  int section;
  float scale, scale_log2;
  ScoreSettings settings;
};

// flash_attention_backward_query_sm80
struct QueryGradientParameters {
  HeadStrides q, k, v, grad_out;
  int batch, heads_q, group;
  int seq_q, seq_kv;
  int rows_per_head;
  int head_dim, value_dim;
  int section;
  float scale, scale_log2;
  ScoreSettings settings;
};

}  // namespace cukit
