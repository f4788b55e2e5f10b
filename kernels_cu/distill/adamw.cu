// Adam with decoupled weight decay over many tensors in one launch.
//
//   g = grad * grad_scale
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
//   w = decay w - step_size m / (sqrt(v) inverse_root + eps),  param = w rounded
//
// with decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^step), inverse_root =
// 1 / sqrt(1 - beta2^step).
//
// Paper: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
// Mapping: one block per CHUNK elements of a tensor; tensor_of_block is the index of the tensor's
//   descriptor, which contains the addresses. No shared memory.
// Macros: DTYPE, GRAD float32|float16|bfloat16: dtypes of the parameters and gradients; MASTER 1:
//   with a float32 master copy, 0: the (float32) parameter is its own master; THREADS; CHUNK a
//   multiple of 4 * THREADS.
// Minimum architecture: sm_80. Arithmetic in float, deterministic. Reference:
// cukit/reference/optimizer.py.
#include "common/platform.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using G = cukit::GRAD;

constexpr int kVec = 4;

struct Tensor {  // int64 [8] on the host
  T* param;
  const G* grad;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  long long size;
  long long first_block;
  long long aligned;  // nonzero if every address is aligned for kVec elements
};

struct Step {
  float beta1, beta2, eps, decay, step_size, inverse_root, grad_scale;
};

template <int N>
CUKIT_DEVICE void update(const Tensor& tensor, long long at, const Step& step) {
  cukit::Vec<float, N> weight, m, v;
  cukit::Vec<G, N> grad;
  cukit::load(grad, tensor.grad + at);
  cukit::load(m, tensor.exp_avg + at);
  cukit::load(v, tensor.exp_avg_sq + at);
  cukit::load(weight, tensor.master + at);
  cukit::Vec<T, N> param;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float g = cukit::to_float(grad[j]) * step.grad_scale;
    m[j] = step.beta1 * m[j] + (1.0f - step.beta1) * g;
    v[j] = step.beta2 * v[j] + (1.0f - step.beta2) * g * g;
    const float direction = m[j] / (sqrtf(v[j]) * step.inverse_root + step.eps);
    weight[j] = step.decay * weight[j] - step.step_size * direction;
    param[j] = cukit::from_float<T>(weight[j]);
  }
  cukit::store(tensor.exp_avg + at, m);
  cukit::store(tensor.exp_avg_sq + at, v);
  if constexpr (MASTER) cukit::store(tensor.master + at, weight);
  cukit::store(tensor.param + at, param);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 4) adamw(
    const Tensor* __restrict__ tensors,           // [num_tensors]
    const int* __restrict__ tensor_of_block,      // [gridDim.x]
    const float* __restrict__ device_grad_scale,  // scalar or null
    float beta1, float beta2, float eps, float decay, float step_size, float inverse_root,
    float grad_scale) {
  Step step{beta1, beta2, eps, decay, step_size, inverse_root, grad_scale};
  if (device_grad_scale != nullptr) step.grad_scale *= *device_grad_scale;
  const Tensor tensor = tensors[tensor_of_block[blockIdx.x]];
  const long long begin = (blockIdx.x - tensor.first_block) * CHUNK;
  const int count = static_cast<int>(min(static_cast<long long>(CHUNK), tensor.size - begin));
  const int in_vectors = tensor.aligned ? count / kVec * kVec : 0;
#pragma unroll 1
  for (int i = threadIdx.x * kVec; i < in_vectors; i += THREADS * kVec) {
    update<kVec>(tensor, begin + i, step);
  }
  for (int i = in_vectors + threadIdx.x; i < count; i += THREADS) {
    update<1>(tensor, begin + i, step);
  }
}
