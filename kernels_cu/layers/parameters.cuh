// Parameter structs of the layer kernels.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts agree.
#pragma once

namespace cukit {

// Strides of an array [batch, seq_len, heads, head_dim], head_dim contiguous, in elements.
struct TokenStrides {
  long long batch, token, head;
};

// rope
struct RopeParameters {
  TokenStrides q, k, q_out, k_out;
  int num_tokens;  // batch * seq_len
  int seq_len;
  int max_positions;  // rows of the cosine and sine tables
};

}  // namespace cukit
