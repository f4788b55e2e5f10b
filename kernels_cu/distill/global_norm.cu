// L2 norm over many tensors: partial sums of squares, one block per CHUNK elements of a tensor
// (sum_of_squares), then the square root of their total (norm_of_partials, one block).
//
// Macros: DTYPE float32|float16|bfloat16; THREADS multiple of 32, 32..1024; CHUNK a multiple of
//   VEC * THREADS; VEC elements per access. Shared memory: THREADS / 32 floats, static.
// Minimum architecture: sm_80. Float accumulation in a fixed order: deterministic. Reference:
// cukit/reference/optimizer.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

struct Tensor {  // int64 [4] on the host
  const T* data;
  long long size;
  long long first_block;
  long long aligned;  // nonzero: data is aligned to VEC elements
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares(
    const Tensor* __restrict__ tensors,       // [num_tensors]
    const int* __restrict__ tensor_of_block,  // [gridDim.x]
    float* __restrict__ partials) {           // [gridDim.x]
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  const Tensor tensor = tensors[tensor_of_block[blockIdx.x]];
  const long long begin = (blockIdx.x - tensor.first_block) * CHUNK;
  const int count = static_cast<int>(min(static_cast<long long>(CHUNK), tensor.size - begin));
  const int in_vectors = tensor.aligned ? count / VEC * VEC : 0;
  const T* data = tensor.data + begin;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x * VEC; i < in_vectors; i += THREADS * VEC) {
    cukit::Vec<T, VEC> values;
    cukit::load(values, data + i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float value = cukit::to_float(values[j]);
      sum += value * value;
    }
  }
  for (int i = in_vectors + threadIdx.x; i < count; i += THREADS) {
    const float value = cukit::to_float(data[i]);
    sum += value * value;
  }
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_of_partials(
    const float* __restrict__ partials,  // [count]
    float* __restrict__ norm,            // scalar
    int count) {
  __shared__ float scratch[THREADS / cukit::kWarpSize];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += THREADS) sum += partials[i];
  sum = cukit::block_reduce<cukit::Sum, THREADS>(sum, scratch);
  if (threadIdx.x == 0) *norm = sqrtf(sum);
}
