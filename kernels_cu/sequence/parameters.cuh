// Parameter structs of the sequence kernels.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts agree.
#pragma once

namespace cukit {

// gated_scan, gated_scan_backward, gated_scan_channels, gated_scan_channels_backward, join_segments
struct ScanParameters {
  int num_sequences, seq_len, num_heads, num_groups, head_dim, state_dim;
  int segments;           // per sequence
  int first_head, heads;  // of the launch
};

// sum_parts
struct SumParameters {
  long long tokens;
  int num_groups, first_group, parts, cols;
};

// gated_scan_step
struct StepParameters {
  int num_heads, num_groups, heads_per_group;
};

// causal_conv, causal_conv_backward, causal_conv_step
struct ConvParameters {
  int seq_len, channels;
};

}  // namespace cukit
