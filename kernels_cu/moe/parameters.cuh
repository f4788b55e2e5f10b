// Parameter structs that the kernels of mixtures of experts take by value.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// topk_router, count_experts, order_experts
struct RoutingParameters {
  int num_tokens, num_experts, top_k;
  int chunk;     // tokens per block
  int capacity;  // rows per expert; 0: as many as it has choices
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
  int vecs;  // accesses per row
};

// bank_means, bank_logits, bank_combine, bank_combine_backward
struct BankParameters {
  int batch, seq_len, dim, top_k, num_layers;
  int parts;  // of a sample's tokens (bank_means, bank_logits) or vectors (bank_combine_backward)
};

}  // namespace cukit
