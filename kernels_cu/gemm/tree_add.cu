// The sum of two partial results of a matrix product (cukit/gemm/dense/tree.py).
//
//   out = a + b      in float, rounded once
//
// Mapping: each thread adds WIDTH adjacent elements. No shared memory.
// Macros: DTYPE float32|float16|bfloat16, of out; WIDTH 1|2|4; THREADS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/gemm.py.
#include "common/platform.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) tree_add(
    const float* a,           // [count]; may be out
    const float* b,           // [count]
    cukit::element_t* out,    // [count]
    const long long count) {  // a multiple of WIDTH
  const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * WIDTH;
  if (at >= count) return;
  cukit::Vec<float, WIDTH> left, right;
  cukit::load(left, a + at);
  cukit::load(right, b + at);
  float sum[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sum[i] = left[i] + right[i];
  cukit::Vec<cukit::element_t, WIDTH> result;
  cukit::from_floats(result, sum);
  cukit::store(out + at, result);
}
