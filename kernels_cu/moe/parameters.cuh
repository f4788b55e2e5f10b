// Parameter structs that the kernels of mixtures of experts take by value.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that the
// layouts agree.
#pragma once

namespace cukit {

// topk_router, count_experts, order_experts
struct RoutingParameters {
  int num_tokens, num_experts, top_k;
  int chunk;     // tokens per block
  int capacity;  // rows per expert; 0: no limit, one row per choice
};

// topk_router_backward
struct RouterGradientParameters {
  int num_tokens, num_experts, top_k;
  float balance_slope;  // grad_balance_loss * num_experts / (num_tokens^2 * top_k); the kernel
                        // multiplies it by the expert's number of choices
  float z_slope;        // grad_z_loss * 2 / num_tokens; multiplied by the token's log-sum-exp
};

// moe_permute, moe_unpermute, moe_unpermute_backward
struct PermuteParameters {
  int num_tokens, top_k;
  int vecs;  // vector accesses per row
};

// bank_means, bank_logits, bank_combine, bank_combine_backward
struct BankParameters {
  int batch, seq_len, dim, top_k, num_layers;
  int parts;  // number of parts into which the tokens (bank_means, bank_logits) or the vectors
              // (bank_combine_backward) of a sample are divided
};

}  // namespace cukit
