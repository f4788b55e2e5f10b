// Online softmax of a warpgroup's scores: running maxima, exponentials, probabilities.
//
// Scores are wgmma accumulators: element 4 n + 2 half + i of a lane is row lane / 4 + 8 half of
// its warp's sixteen, column 8 n + 2 (lane % 4) + i.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/pack.cuh"

namespace cukit {

// Softmax state of a lane's two rows.
struct SoftmaxRows {
  float max[2];
  float sum[2];  // over this lane's columns; summed over the quad at the end
};

// Softmax does not depend on the subtracted value, so a maximum is updated only once it has grown
// by more than this, in log2 units. Most tiles then rescale nothing.
constexpr float kLazyGrowth = 8.0f;

// Updates the maxima if one in the warp has grown by more than `growth`, and returns whether it
// did: the caller then multiplies the rows' accumulators by `shrink`. A negative growth always
// updates, which saves a vote and a branch.
//
// AsIntegers: non-negative floats are ordered like their bits as integers, and Hopper has a
// three-input integer maximum. The integer maximum is used if all of the warp's maxima are
// non-negative: a negative score, which is a negative integer too, then exceeds none of them.
// Faster for wide tiles.
template <int N, bool AsIntegers = N >= 64>
CUKIT_DEVICE bool update_maxima(SoftmaxRows& rows, float (&shrink)[2], const float (&scores)[N],
                               float scale_log2, float growth = kLazyGrowth) {
  float seen[2] = {rows.max[0], rows.max[1]};
  if (AsIntegers &&
      __all_sync(kFullMask, (__float_as_int(seen[0]) | __float_as_int(seen[1])) >= 0)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int top = __float_as_int(seen[half]);
#pragma unroll
      for (int n = 0; n < N / 4; ++n) {
        const float* pair = &scores[4 * n + 2 * half];
        top = max(max(__float_as_int(pair[0]), __float_as_int(pair[1])), top);
      }
      seen[half] = __int_as_float(top);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < N / 4; ++n) {
        const float* pair = &scores[4 * n + 2 * half];
        seen[half] = fmaxf(seen[half], fmaxf(pair[0], pair[1]));
      }
  }
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // If both are -infinity the difference is NaN, and the comparison false.
    grown |= (seen[half] - rows.max[half]) * scale_log2 > growth;
  }
  if (growth >= 0.0f && !__any_sync(kFullMask, grown)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    seen[half] = fmaxf(seen[half], __shfl_xor_sync(kFullMask, seen[half], 1));
    seen[half] = fmaxf(seen[half], __shfl_xor_sync(kFullMask, seen[half], 2));
    const float base = seen[half] == -infinity() ? 0.0f : seen[half];
    shrink[half] = exp2f((rows.max[half] - base) * scale_log2);
    rows.max[half] = seen[half];
    rows.sum[half] *= shrink[half];
  }
  return true;
}

template <int N>
CUKIT_DEVICE void rescale(float (&out)[N], const float (&shrink)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] *= shrink[i / 2 % 2];
}

// Replaces scores by 2^Offset exp2(scale_log2 * (scores - max)), and adds them to the sums.
template <int Offset = 0, int N>
CUKIT_DEVICE void exponentiate(SoftmaxRows& rows, float (&scores)[N], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = Offset == 0 ? -rows.max[half] * scale_log2
                                   : fmaf(-rows.max[half], scale_log2, static_cast<float>(Offset));
    const float shift = rows.max[half] == -infinity() ? 0.0f : base;
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      float* pair = &scores[4 * n + 2 * half];
      pair[0] = exp2f(fmaf(pair[0], scale_log2, shift));
      pair[1] = exp2f(fmaf(pair[1], scale_log2, shift));
      rows.sum[half] += pair[0] + pair[1];
    }
  }
}

// Packs the probabilities as register operand A of P V, sixteen keys per step.
template <typename T, int N>
CUKIT_DEVICE void pack_probabilities(unsigned (&p)[N / 8][4], const float (&scores)[N]) {
#pragma unroll
  for (int step = 0; step < N / 8; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[step][i] = pack<T>(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
    }
}

}  // namespace cukit
