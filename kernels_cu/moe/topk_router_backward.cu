// Gradient of topk_router with respect to the logits.
//
//   dL/dscore = grad_weights at the choices, with RENORMALIZE through the division by their sum
//             + grad_balance_loss * num_experts / num_tokens * share[e], with Sigmoid through the
//               division of the scores by their sum over the experts
//   dL/dlogit = dL/dscore through softmax or sigmoid
//             + grad_z_loss * 2 / num_tokens * log_sum_exp * softmax
//
// share[e]: the fraction of all choices that selected e. The loss terms need LOSSES. The choices
// and their counts are treated as constants; the weight of a dropped choice has no gradient.
// Mapping: one warp per token (router_scores.cuh), THREADS / 32 tokens per block. No shared memory.
// Macros: router_scores.cuh; RENORMALIZE, LOSSES 0|1; THREADS. Minimum architecture: sm_80.
// Computes in float; deterministic. Reference: cukit/reference/moe.py, topk_router_backward.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "moe/parameters.cuh"
#include "moe/router_scores.cuh"

namespace {

using T = cukit::element_t;
using cukit::kFullMask;
using cukit::kPerLane;
using cukit::kWarpSize;

constexpr bool kSoftmax = cukit::kScoring == cukit::Scoring::Softmax;

CUKIT_DEVICE float warp_sum(float value) { return cukit::warp_reduce<cukit::Sum>(value); }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) topk_router_backward(
    const float* __restrict__ grad_weights,  // [num_tokens, top_k]
    const T* __restrict__ logits,            // [num_tokens, num_experts]
    const int* __restrict__ experts,         // [num_tokens, top_k]
    const int* __restrict__ rows,            // [num_tokens, top_k]: negative for dropped choices
    const int* __restrict__ counts,          // [num_experts]
    T* __restrict__ grad_logits,             // [num_tokens, num_experts]
    const __grid_constant__ cukit::RouterGradientParameters p) {
  const int lane = threadIdx.x % kWarpSize;
  const long long token =
      static_cast<long long>(blockIdx.x) * (THREADS / kWarpSize) + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;

  float row[kPerLane], scores[kPerLane];
  cukit::LogitRow<T> loaded;
  loaded.load(logits + token * p.num_experts, p.num_experts);
  loaded.convert(row, p.num_experts);
  const cukit::RowSoftmax softmax(row);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    scores[j] = kSoftmax ? softmax.probability(row[j]) : cukit::sigmoid(row[j]);
  }

  // Lane s holds choice s.
  int expert = -1;
  float grad = 0.0f, score = 0.0f;
  if (lane < p.top_k) {
    const long long at = token * p.top_k + lane;
    expert = experts[at];
    grad = rows[at] < 0 ? 0.0f : grad_weights[at];
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const float other = __shfl_sync(kFullMask, scores[j], max(expert, 0) / kPerLane);
    if (expert >= 0 && expert % kPerLane == j) score = other;
  }
  if constexpr (RENORMALIZE) {
    const float total = cukit::nonzero(warp_sum(score));
    grad = (grad - warp_sum(grad * score / total)) / total;
  }

  float grads[kPerLane] = {};  // of the scores
  for (int slot = 0; slot < p.top_k; ++slot) {
    const int chosen = __shfl_sync(kFullMask, expert, slot) - lane * kPerLane;
    const float of_choice = __shfl_sync(kFullMask, grad, slot);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (chosen == j) grads[j] = of_choice;
    }
  }

  if constexpr (LOSSES) {
    float slopes[kPerLane];
    float total = 0.0f, mean = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int of = lane * kPerLane + j;
      slopes[j] = of < p.num_experts ? p.balance_slope * counts[of] : 0.0f;
      total += scores[j];
      mean += scores[j] * slopes[j];
    }
    if constexpr (kSoftmax) {
      total = 1.0f;
      mean = 0.0f;  // the softmax gradient below accounts for its divisor
    } else {
      total = cukit::nonzero(warp_sum(total));
      mean = warp_sum(mean) / total;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) grads[j] += (slopes[j] - mean) / total;
  }

  float mean = 0.0f;
  if constexpr (kSoftmax) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) mean += scores[j] * grads[j];
    mean = warp_sum(mean);
  }
  const float z_slope = LOSSES ? p.z_slope * softmax.log_sum_exp() : 0.0f;
  T* const into = grad_logits + token * p.num_experts + lane * kPerLane;
#pragma unroll
  for (int j = 0; j < kPerLane; j += VEC) {
    cukit::Vec<T, VEC> chunk;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float score_slope = kSoftmax ? scores[j + i] : scores[j + i] * (1.0f - scores[j + i]);
      float value = score_slope * (grads[j + i] - mean);
      if constexpr (LOSSES) value += z_slope * softmax.probability(row[j + i]);
      chunk[i] = cukit::from_float<T>(value);
    }
    if (lane * kPerLane + j < p.num_experts) cukit::store(into + j, chunk);
  }
}
