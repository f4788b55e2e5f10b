// Mixture of depths: the rows of the tokens that a block is to work on.
//
//   out[b, i] = x[b, indices[b, i]]
//
// Mapping: a block a row. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; VEC elements of an access; THREADS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/depth.py.
#include "common/platform.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) depth_gather(
    const cukit::element_t* __restrict__ x,    // [batch, seq_len, hidden]
    const int* __restrict__ indices,           // [batch, capacity]
    cukit::element_t* __restrict__ out,        // [batch, capacity, hidden]
    int seq_len, int capacity, int hidden) {   // hidden: a multiple of VEC
  const long long row = blockIdx.x;
  x += (row / capacity * seq_len + indices[row]) * hidden;
  out += row * hidden;
  for (int i = threadIdx.x * VEC; i < hidden; i += THREADS * VEC) {
    cukit::Vec<cukit::element_t, VEC> values;
    cukit::load(values, x + i);
    cukit::store(out + i, values);
  }
}
