// Parameter structs of the distillation kernels.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts
// agree.
#pragma once

namespace cukit {

// cross_entropy, divergence, topk_divergence: the rows of logits
struct LogitRows {
  long long ignore_index;    // of targets
  long long row_stride;      // of the student's logits and their gradient, in elements
  long long teacher_stride;  // likewise; divergence only
  int columns;               // that hold logits: the vocabulary, or this process's shard of it
  int width;                 // of the gradient's rows; columns from `columns` on are zeroed
  int grad_loss_stride;      // 1: one value per row, 0: a scalar
};

// This process's shard of the vocabulary, if rows are sharded over processes; see
// distill/row_shard.cuh
struct RowShard {
  long long first_column;  // of the shard
  long long columns;       // of the whole vocabulary
  long long rows;          // in this launch
  int rank, size;          // index of the shard, and number of shards
};

// The transform from elements of a tensor to logits; see distill/logits.cuh
struct LogitTransform {
  float scale;
  float cap, inverse_cap;  // 0: no cap
};

// cross_entropy, divergence, topk_divergence: factors of losses and gradients; beta of the
// divergence
struct LossFactors {
  float inverse_temperature;
  float soft_loss;
  float soft_gradient, hard_gradient;
  float beta;
  LogitTransform student, teacher;
};

}  // namespace cukit
