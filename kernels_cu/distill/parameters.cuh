// Parameters that the distillation kernels take by value.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// cross_entropy, divergence, topk_divergence: the rows of logits
struct LogitRows {
  long long ignore_index;    // of targets
  long long row_stride;      // of the student's logits and their gradient, in elements
  long long teacher_stride;  // likewise; divergence only
  int columns;               // in use: the vocabulary
  int width;                 // of the gradient, whose columns from `columns` on are zeroed
  int grad_loss_stride;      // 1: one value per row, 0: a scalar
};

// This process's shard of the vocabulary, if rows are sharded over processes; see
// distill/row_shard.cuh
struct RowShard {
  long long first_column;  // of the shard
  long long columns;       // of the whole vocabulary
  long long rows;          // of the launch
  int rank, size;          // index of the shard, and number of shards
};

// Transform from elements of a tensor to logits, see distill/logits.cuh
struct LogitTransform {
  float scale;
  float cap, inverse_cap;  // 0: no cap
};

// cross_entropy, divergence, topk_divergence: factors of losses and gradients; beta of a divergence
struct LossFactors {
  float inverse_temperature;
  float soft_loss;
  float soft_gradient, hard_gradient;
  float beta;
  LogitTransform student, teacher;
};

}  // namespace cukit
