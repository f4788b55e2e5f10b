// Gradient of embedding, second step: sums the parts of runs that cross chunks.
//
// Mapping: block (c, s) sums the run that starts in chunk c and continues in chunk c + 1, in slice
//   s of THREADS * VEC columns; if there is no such run, the block returns immediately. No shared
//   memory.
// Macros: OUT, THREADS, VEC 1|2|4 and SPAN as in layers/runs.cuh. Requires hidden % VEC == 0.
//   Minimum architecture: sm_80. Accumulates in float in token order: deterministic. Reference:
//   cukit/reference/embedding.py.
#include "common/platform.cuh"
#include "layers/runs.cuh"
#include "common/types.cuh"

using Out = cukit::OUT;

extern "C" __global__ void __launch_bounds__(THREADS) embedding_backward_join(
    const unsigned int* __restrict__ keys,  // [num_tokens], ascending; >= num_keys: ignored
    const float* __restrict__ parts,        // [chunks, 2, hidden]
    Out* __restrict__ grad_weight,          // [num_keys, hidden]
    int num_tokens, int num_keys, int hidden) {
  const int chunk = blockIdx.x;
  const int next = (chunk + 1) * SPAN;
  if (next >= num_tokens) return;
  const unsigned int key = keys[next - 1];
  const int begin = chunk * SPAN;
  const bool starts_here = keys[begin] != key || begin == 0 || keys[begin - 1] != key;
  if (keys[next] != key || !starts_here || key >= num_keys) return;
  const int col = (blockIdx.y * THREADS + threadIdx.x) * VEC;
  if (col >= hidden) return;

  // The last chunk whose first token belongs to the run, by binary search: keys ascend.
  int last = chunk + 1, beyond = (num_tokens + SPAN - 1) / SPAN;
  while (beyond - last > 1) {
    const int middle = last + (beyond - last) / 2;
    if (keys[static_cast<long long>(middle) * SPAN] == key) {
      last = middle;
    } else {
      beyond = middle;
    }
  }
  cukit::Vec<float, VEC> part;
  float sum[VEC];
  cukit::load(part, parts + cukit::part_offset(chunk, cukit::kPartStarted, hidden) + col);
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = part[j];
#pragma unroll 8
  for (int c = chunk + 1; c <= last; ++c) {
    cukit::load(part, parts + cukit::part_offset(c, cukit::kPartContinued, hidden) + col);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] += part[j];
  }
  cukit::store_floats(grad_weight + static_cast<long long>(key) * hidden + col, sum);
}
