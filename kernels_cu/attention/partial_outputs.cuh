// Partial outputs of FP8 attention in shared memory, outside the tensor-core accumulators.
//
// Hopper accumulates FP8 products with about 14 bits: terms are truncated relative to the largest
// number of the sum. If values have one sign, the truncation errors of many small terms beside a
// large sum add up. Every `Period` tiles of keys the accumulators are therefore added to partial
// outputs in shared memory and reset to zero.
//
// Paper: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437.
#pragma once

#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/softmax/online_softmax.cuh"

namespace cukit {

// N outputs of each of `Threads` consumer threads, in the layout of wgmma accumulators. A thread
// reads only the outputs that it wrote itself, so no barrier is needed.
template <int N, int Threads, int Period>
struct PartialOutputs {
  unsigned char* shared;  // [N / 8][Threads] of eight bfloat16, [Threads] of two maxima
  int left;               // tiles until the next take()
  bool any;               // take() has been called

  CUKIT_DEVICE explicit PartialOutputs(unsigned char* first) : shared(first) {}

  // Call before each tile of queries.
  CUKIT_DEVICE void clear() {
    left = Period;
    any = false;
  }

  // Call once per tile of keys. Returns whether to call take() for this tile.
  CUKIT_DEVICE bool due() {
    if (--left > 0) return false;
    left = Period;
    return true;
  }

  // Adds the partial outputs, rescaled to softmax.max, to `outputs`.
  CUKIT_DEVICE void add_to(float (&outputs)[N], const SoftmaxRows& softmax,
                           float scale_log2) const {
    const float2 before = *maxima();
    const uint4* const partial = chunks();
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = softmax.max[half] == -infinity() ? 0.0f : softmax.max[half];
      shrink[half] = exp2f(((half == 0 ? before.x : before.y) - base) * scale_log2);
    }
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint4 eight = partial[i * Threads];
      const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        outputs[8 * i + 2 * j] += __uint_as_float(pairs[j] << 16) * shrink[j % 2];
        outputs[8 * i + 2 * j + 1] += __uint_as_float(pairs[j] & 0xffff0000u) * shrink[j % 2];
      }
    }
  }

  // Moves `outputs` to the partial outputs and sets `outputs` to zero.
  CUKIT_DEVICE void take(float (&outputs)[N], const SoftmaxRows& softmax, float scale_log2) {
    if (any) add_to(outputs, softmax, scale_log2);
    any = true;
    *maxima() = make_float2(softmax.max[0], softmax.max[1]);
    uint4* const partial = chunks();
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      unsigned pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = pack<__nv_bfloat16>(outputs[8 * i + 2 * j], outputs[8 * i + 2 * j + 1]);
      }
      partial[i * Threads] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) outputs[i] = 0.0f;
  }

 private:
  // Recomputed on each use to save registers.
  CUKIT_DEVICE static int thread() { return threadIdx.x - kWarpgroupThreads; }
  CUKIT_DEVICE uint4* chunks() const { return reinterpret_cast<uint4*>(shared) + thread(); }
  CUKIT_DEVICE float2* maxima() const {
    return reinterpret_cast<float2*>(shared + N / 8 * Threads * sizeof(uint4)) + thread();
  }
};

}  // namespace cukit
