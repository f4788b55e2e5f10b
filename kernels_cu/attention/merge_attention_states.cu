// Attention over two sets of keys, from attention over each: outputs weighted by their sums.
//
//   lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
//   A side whose lse is -infinity saw no key: its output is not read. Both: out = 0.
//
// Paper: Milakov and Gimelshein, arXiv:1805.02867; Ye et al., FlashInfer, arXiv:2501.01005.
// Mapping: a thread takes 8 columns of a row; a row is a query and a head.
// Macros: DTYPE float16|bfloat16; THREADS. Minimum architecture: sm_80.
// Computes in float; deterministic. Reference: cukit/reference/paged_attention.py.
#include "common/platform.cuh"
#include "common/types.cuh"

using T = cukit::element_t;
using V = cukit::Vec<T, 8>;

extern "C" __global__ void __launch_bounds__(THREADS) merge_attention_states(
    const T* __restrict__ out_a,      // [batch, seq, heads, vecs * 8]
    const float* __restrict__ lse_a,  // [batch, heads, seq]
    const T* __restrict__ out_b, const float* __restrict__ lse_b,  // the same
    T* __restrict__ out, float* __restrict__ lse,                  // the same
    long long num_vecs, int vecs, int heads, int seq) {
  const long long index = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= num_vecs) return;
  const long long row = index / vecs;
  const long long query = row / heads;  // of the batch
  const long long statistic = (query / seq * heads + row % heads) * seq + query % seq;
  const float a = lse_a[statistic];
  const float b = lse_b[statistic];
  const float top = fmaxf(a, b);
  const float weight_a = a == -cukit::infinity() ? 0.0f : __expf(a - top);
  const float weight_b = b == -cukit::infinity() ? 0.0f : __expf(b - top);
  const float total = weight_a + weight_b;

  float sum[8] = {};
  const auto add = [&](const T* from, float weight) {
    if (weight == 0.0f) return;
    float values[8];
    cukit::to_floats(values, reinterpret_cast<const V*>(from)[index]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(values[i], weight / total, sum[i]);
  };
  add(out_a, weight_a);
  add(out_b, weight_b);
  V packed;
  cukit::from_floats(packed, sum);
  reinterpret_cast<V*>(out)[index] = packed;
  if (index % vecs == 0) lse[statistic] = total == 0.0f ? top : top + __logf(total);
}
