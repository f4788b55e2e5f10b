// Exponential moving averages over many tensors in one launch.
//
//   average += (1 - decay) (value - average),  copy = average rounded
//
// Mapping: one block per CHUNK elements of a tensor; tensor_of_block is the index of the tensor's
//   descriptor, which contains the addresses. No shared memory.
// Macros: DTYPE, VALUE float32|float16|bfloat16: dtypes of the copies and of the values; COPY 1:
//   the average is also written to a copy, rounded, 0: only the (float32) average is written;
//   THREADS; CHUNK a multiple of 4 * THREADS.
// Minimum architecture: sm_80. Arithmetic in float, deterministic. Reference:
// cukit/reference/optimizer.py.
#include "common/platform.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using V = cukit::VALUE;

constexpr int kVec = 4;

struct Tensor {  // int64 [6] on the host
  float* average;
  const V* value;
  T* copy;
  long long size;
  long long first_block;
  long long aligned;  // nonzero if every address is aligned for kVec elements
};

template <int N>
CUKIT_DEVICE void update(const Tensor& tensor, long long at, float share) {
  cukit::Vec<float, N> average;
  cukit::Vec<V, N> value;
  cukit::load(average, tensor.average + at);
  cukit::load(value, tensor.value + at);
  cukit::Vec<T, N> copy;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    average[j] = fmaf(share, cukit::to_float(value[j]) - average[j], average[j]);
    copy[j] = cukit::from_float<T>(average[j]);
  }
  cukit::store(tensor.average + at, average);
  if constexpr (COPY) cukit::store(tensor.copy + at, copy);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 4) ema_update(
    const Tensor* __restrict__ tensors,       // [num_tensors]
    const int* __restrict__ tensor_of_block,  // [gridDim.x]
    float share) {                            // 1 - decay
  const Tensor tensor = tensors[tensor_of_block[blockIdx.x]];
  const long long begin = (blockIdx.x - tensor.first_block) * CHUNK;
  const int count = static_cast<int>(min(static_cast<long long>(CHUNK), tensor.size - begin));
  const int in_vectors = tensor.aligned ? count / kVec * kVec : 0;
#pragma unroll 2
  for (int i = threadIdx.x * kVec; i < in_vectors; i += THREADS * kVec) {
    update<kVec>(tensor, begin + i, share);
  }
  for (int i = in_vectors + threadIdx.x; i < count; i += THREADS) {
    update<1>(tensor, begin + i, share);
  }
}
