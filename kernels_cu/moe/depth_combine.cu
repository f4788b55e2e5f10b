// Mixture of depths: adds the outputs of a block of layers to the residual stream.
//
//   out = x + weight * y for the tokens with a slot in [0, capacity), else x
//
// Mapping: one thread block per token. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; VEC elements per access; THREADS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/depth.py.
#include "common/platform.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) depth_combine(
    const cukit::element_t* x,               // [batch, seq_len, hidden]; may alias out
    const cukit::element_t* __restrict__ y,  // [batch, capacity, hidden]
    const float* __restrict__ weights,       // [batch, capacity]
    const int* __restrict__ slots,           // [batch, seq_len]
    cukit::element_t* out,                   // [batch, seq_len, hidden]
    int seq_len, int capacity, int hidden) {  // hidden: a multiple of VEC
  const long long token = blockIdx.x;
  const int slot = slots[token];
  const long long row = token / seq_len * capacity + slot;
  const bool chosen = slot >= 0 && slot < capacity;
  const float weight = chosen ? weights[row] : 0.0f;
  x += token * hidden;
  out += token * hidden;
  for (int i = threadIdx.x * VEC; i < hidden; i += THREADS * VEC) {
    cukit::Vec<cukit::element_t, VEC> values;
    cukit::load(values, x + i);
    if (chosen) {
      cukit::Vec<cukit::element_t, VEC> added;
      cukit::load(added, y + row * hidden + i);
      float sums[VEC], terms[VEC];
      cukit::to_floats(sums, values);
      cukit::to_floats(terms, added);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[j] += weight * terms[j];
      cukit::from_floats(values, sums);
    }
    cukit::store(out + i, values);
  }
}
