// What kernels of distillation take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// divergence, topk_divergence: the rows of logits
struct LogitRows {
  long long ignore_index;  // of targets
  long long row_stride;    // in elements
  int columns;
  int grad_loss_stride;  // 1: one for each row, 0: a scalar
};

// likewise: what the losses and their gradients are multiplied by; beta of a divergence
struct DivergenceFactors {
  float inverse_temperature;
  float soft_loss;
  float soft_gradient, hard_gradient;
  float beta;
};

}  // namespace cukit
