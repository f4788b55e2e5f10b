// GELU and its gradient, elementwise.
//
//   out = gelu(x)        BACKWARD: grad_x = grad_out * gelu'(x)
//
// Paper: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.
// Mapping: a block processes THREADS * VECS_PER_THREAD consecutive vectors; thread t processes
//   vectors t, t + THREADS, ... of the block, and issues all its loads before the first use.
//   Threads of block 0 also process the elements after the last full vector. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; THREADS; VEC elements per access (VEC * sizeof(DTYPE) <=
//   16); VECS_PER_THREAD; ACTIVATION GeluErf|GeluTanh; INDEX uint32|uint64, which must hold the
//   number of vectors plus one block's; BACKWARD 0|1.
// Minimum architecture: sm_80. Computes in float; deterministic. Reference:
//   cukit/reference/activations.py.
#include "common/platform.cuh"
#include "common/activation.cuh"
#include "common/index.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Activation = cukit::activation_t<T>;

CUKIT_DEVICE T evaluate(T x, T grad) {
  if constexpr (BACKWARD) {
    float slope;
    Activation::value_and_slope(cukit::to_float(x), &slope);
    return cukit::from_float<T>(cukit::to_float(grad) * slope);
  } else {
    return cukit::from_float<T>(Activation::value(cukit::to_float(x)));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) gelu(
    const T* __restrict__ x,         // [size]
    const T* __restrict__ grad_out,  // [size], BACKWARD only
    T* __restrict__ out,             // [size]; may alias x or grad_out
    long long size) {
  const long long num_vecs = size / VEC;
  const cukit::index_t first =
      static_cast<cukit::index_t>(blockIdx.x) * (THREADS * VECS_PER_THREAD) + threadIdx.x;

  cukit::Vec<T, VEC> values[VECS_PER_THREAD], grads[VECS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const cukit::index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
    cukit::load<cukit::Cache::Kept>(values[i], x + static_cast<long long>(index) * VEC);
    if constexpr (BACKWARD) {
      cukit::load<cukit::Cache::Kept>(grads[i], grad_out + static_cast<long long>(index) * VEC);
    }
  }
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const cukit::index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < VEC; ++j) values[i][j] = evaluate(values[i][j], grads[i][j]);
    cukit::store(out + static_cast<long long>(index) * VEC, values[i]);
  }
  if (blockIdx.x == 0 && threadIdx.x < size - num_vecs * VEC) {
    const long long index = num_vecs * VEC + threadIdx.x;
    out[index] = evaluate(x[index], BACKWARD ? grad_out[index] : x[index]);
  }
}
