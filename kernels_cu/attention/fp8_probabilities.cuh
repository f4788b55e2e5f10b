// Probabilities of eight bits, and what a warpgroup keeps of its outputs outside the tensor core.
//
// Elements of scores and outputs lie as wgmma leaves them (online_softmax.cuh).
#pragma once

#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/softmax/online_softmax.cuh"

namespace cukit {

// Probabilities are rounded as 2^kOffset times themselves, so that those below the maximum use the
// exponents that e4m3 has: 2^8 is its largest power of two, 2^-9 its smallest. The maxima may lag
// behind by the rest.
constexpr float kFp8Offset = 5.0f;
constexpr float kFp8Growth = 8.0f - kFp8Offset;

// scores = 2^(kFp8Offset + scale * (scores - max)), added to the sums.
template <int N>
CUKIT_DEVICE void exponentiate_fp8(SoftmaxRows& rows, float (&scores)[N], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float shift =
        rows.max[half] == -infinity() ? 0.0f : fmaf(-rows.max[half], scale_log2, kFp8Offset);
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      float* pair = &scores[4 * n + 2 * half];
      pair[0] = exp2f(fmaf(pair[0], scale_log2, shift));
      pair[1] = exp2f(fmaf(pair[1], scale_log2, shift));
      rows.sum[half] += pair[0] + pair[1];
    }
  }
}

// Operand a of a product over the keys, 32 of them a step, in the order of fp8_values.cuh.
template <int N>
CUKIT_DEVICE void pack_probabilities_fp8(unsigned (&p)[N / 16][4], const float (&scores)[N]) {
#pragma unroll
  for (int step = 0; step < N / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* of = &scores[16 * step + 8 * (i / 2) + 2 * (i % 2)];
      p[step][i] = pack_e4m3(of[0], of[1], of[4], of[5]);
    }
}

// The outputs of the tiles before, N of a thread, in shared memory: its own, so that nobody waits.
template <int N, int Threads>
struct KeptOutputs {
  uint4* outputs;  // [N / 8][Threads], eight bfloat16 each
  float2* maxima;  // [Threads]: what the outputs are relative to
  bool any;

  CUKIT_DEVICE KeptOutputs(unsigned char* shared, int thread)
      : outputs(reinterpret_cast<uint4*>(shared) + thread),
        maxima(reinterpret_cast<float2*>(shared + N / 8 * Threads * sizeof(uint4)) + thread),
        any(false) {}

  // Adds them to `sums`, which are relative to rows.max.
  CUKIT_DEVICE void add_to(float (&sums)[N], const SoftmaxRows& rows, float scale_log2) const {
    const float2 before = *maxima;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = rows.max[half] == -infinity() ? 0.0f : rows.max[half];
      shrink[half] = exp2f(((half == 0 ? before.x : before.y) - base) * scale_log2);
    }
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint4 eight = outputs[i * Threads];
      const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[8 * i + 2 * j] += __uint_as_float(pairs[j] << 16) * shrink[j % 2];
        sums[8 * i + 2 * j + 1] += __uint_as_float(pairs[j] & 0xffff0000u) * shrink[j % 2];
      }
    }
  }

  // Takes `sums` in and leaves zeros.
  CUKIT_DEVICE void take(float (&sums)[N], const SoftmaxRows& rows, float scale_log2) {
    if (any) add_to(sums, rows, scale_log2);
    any = true;
    *maxima = make_float2(rows.max[0], rows.max[1]);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      unsigned pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = pack<__nv_bfloat16>(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
      }
      outputs[i * Threads] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = 0.0f;
  }
};

}  // namespace cukit
