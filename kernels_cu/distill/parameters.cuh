// What kernels of distillation take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// cross_entropy, divergence, topk_divergence: the rows of logits
struct LogitRows {
  long long ignore_index;    // of targets
  long long row_stride;      // of the student's logits and their gradient, in elements
  long long teacher_stride;  // likewise; divergence only
  int columns;               // that count: the vocabulary
  int width;                 // of the gradient, whose columns from `columns` on are zeroed
  int grad_loss_stride;      // 1: one for each row, 0: a scalar
};

// The part of the vocabulary that this process has, where rows are spread over processes; see
// distill/row_shard.cuh
struct RowShard {
  long long first_column;  // of this part
  long long columns;       // of the whole vocabulary
  long long rows;          // of a launch
  int rank, size;          // which part of how many
};

// How elements of a tensor become logits, see distill/logits.cuh
struct LogitTransform {
  float scale;
  float cap, inverse_cap;  // 0: no cap
};

// likewise: what the losses and their gradients are multiplied by; beta of a divergence
struct LossFactors {
  float inverse_temperature;
  float soft_loss;
  float soft_gradient, hard_gradient;
  float beta;
  LogitTransform student, teacher;
};

}  // namespace cukit
