// Mixture of depths: gathers the rows of the chosen tokens.
//
//   out[b, i] = x[b, indices[b, i]], or NaN for an index outside the sequence
//
// Mapping: one thread block per row. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; VEC elements per access; THREADS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/depth.py.
#include "common/platform.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) depth_gather(
    const cukit::element_t* __restrict__ x,    // [batch, seq_len, hidden]
    const int* __restrict__ indices,           // [batch, capacity]
    cukit::element_t* __restrict__ out,        // [batch, capacity, hidden]
    int seq_len, int capacity, int hidden) {   // hidden: a multiple of VEC
  const long long row = blockIdx.x;
  const int index = indices[row];
  const bool inside = index >= 0 && index < seq_len;
  x += (row / capacity * seq_len + index) * hidden;
  out += row * hidden;
  for (int i = threadIdx.x * VEC; i < hidden; i += THREADS * VEC) {
    cukit::Vec<cukit::element_t, VEC> values;
    if (inside) {
      cukit::load(values, x + i);
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        values[j] = cukit::from_float<cukit::element_t>(__int_as_float(0x7fffffff));
      }
    }
    cukit::store(out + i, values);
  }
}
