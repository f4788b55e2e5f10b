// Merges attention over two sets of keys, a and b: the mean of their outputs, weighted by their
// sums of exponentials.
//
//   lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
//   An lse of -infinity means that the set had no visible key: its output is ignored, even if NaN.
//   If both are -infinity, out = 0.
//
// Paper: Milakov and Gimelshein, arXiv:1805.02867; Ye et al., FlashInfer, arXiv:2501.01005.
// Mapping: a thread processes VECS chunks of 8 columns; all loads are issued before the first use.
//   A row is a query and a head.
// Macros: DTYPE float16|bfloat16; THREADS; VECS; SHARED 0|1: attention over set a was computed
//   for `shared` neighbouring requests together, whose queries are concatenated in lse_a.
// Minimum architecture: sm_80. Computes in float; deterministic.
// Reference: cukit/reference/paged_attention.py.
#include "common/platform.cuh"
#include "common/types.cuh"

#ifndef SHARED
#define SHARED 0
#endif

using T = cukit::element_t;
using V = cukit::Vec<T, 8>;

extern "C" __global__ void __launch_bounds__(THREADS) merge_attention_states(
    const T* __restrict__ out_a,      // [batch, seq, heads, vecs * 8]
    const float* __restrict__ lse_a,  // [batch, heads, seq]; SHARED: [batch / shared, heads,
                                      // shared * seq]
    const T* __restrict__ out_b, const float* __restrict__ lse_b,  // the same
    T* __restrict__ out, float* __restrict__ lse,                  // the same
    // 32 bits: 64-bit divisions by these would take longer than the loads.
    unsigned num_vecs, unsigned vecs, unsigned heads, unsigned seq
#if SHARED
    ,
    unsigned shared
#endif
) {
  const unsigned first = blockIdx.x * (THREADS * VECS) + threadIdx.x;
  unsigned statistics[VECS];
  V side_a[VECS];
  V side_b[VECS];
  float a[VECS];
  float b[VECS];
#pragma unroll
  for (int j = 0; j < VECS; ++j) {
    const unsigned index = first + j * THREADS;
    if (index >= num_vecs) break;
    const unsigned row = index / vecs;
    const unsigned query = row / heads;  // of the batch
    statistics[j] = (query / seq * heads + row % heads) * seq + query % seq;
#if SHARED
    const unsigned request = query / seq;
    const unsigned group = request / shared * heads + row % heads;
    a[j] = lse_a[(group * shared + request % shared) * seq + query % seq];
#else
    a[j] = lse_a[statistics[j]];
#endif
    b[j] = lse_b[statistics[j]];
    side_a[j] = reinterpret_cast<const V*>(out_a)[index];
    side_b[j] = reinterpret_cast<const V*>(out_b)[index];
  }
#pragma unroll
  for (int j = 0; j < VECS; ++j) {
    const unsigned index = first + j * THREADS;
    if (index >= num_vecs) break;
    const float top = fmaxf(a[j], b[j]);
    const float weight_a = a[j] == -cukit::infinity() ? 0.0f : __expf(a[j] - top);
    const float weight_b = b[j] == -cukit::infinity() ? 0.0f : __expf(b[j] - top);
    const float total = weight_a + weight_b;
    const float scale = total == 0.0f ? 0.0f : __fdividef(1.0f, total);

    float sum[8] = {};
    const auto add = [&](const V& from, float weight) {
      if (weight == 0.0f) return;
      float values[8];
      cukit::to_floats(values, from);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(values[i], weight, sum[i]);
    };
    add(side_a[j], weight_a * scale);
    add(side_b[j], weight_b * scale);
    V packed;
    cukit::from_floats(packed, sum);
    reinterpret_cast<V*>(out)[index] = packed;
    if (index % vecs == 0) lse[statistics[j]] = total == 0.0f ? top : top + __logf(total);
  }
}
