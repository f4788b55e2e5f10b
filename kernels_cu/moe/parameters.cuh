// What the kernels of mixture of experts take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// topk_router, count_experts, order_experts
struct RoutingParameters {
  int num_tokens, num_experts, top_k;
  int chunk;     // tokens of a block
  int capacity;  // rows of an expert; 0: as many as it has choices
};

// topk_router_backward
struct RouterGradientParameters {
  int num_tokens, num_experts, top_k;
  float balance_slope;  // grad_balance_loss * num_experts / (num_tokens^2 * top_k), times a count
  float z_slope;        // grad_z_loss * 2 / num_tokens, times a log-sum-exp
};

// moe_permute, moe_unpermute, moe_unpermute_backward
struct PermuteParameters {
  int num_tokens, top_k;
  int vecs;  // accesses of a row
};

// bank_means, bank_logits, bank_combine, bank_combine_backward
struct BankParameters {
  int batch, seq_len, dim, top_k, num_layers;
  int parts;  // of a sample: of its tokens (bank_means, bank_logits) or vectors (bank_combine_backward)
};

}  // namespace cukit
