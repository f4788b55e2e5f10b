// Outputs that a warpgroup keeps outside the tensor core.
//
// Hopper adds float8 products with about 14 bits: it cuts them below the largest number it adds, so
// that many small ones beside a large sum lose what adds up where values have one sign. After
// `Period` tiles of keys the sum so far goes to shared memory, and the tensor core begins anew.
//
// Paper: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437.
#pragma once

#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/softmax/online_softmax.cuh"

namespace cukit {

// Of N outputs of each of `Threads` consumer threads, as wgmma leaves them. Every thread reads what it
// has written: nobody waits.
template <int N, int Threads, int Period>
struct KeptSums {
  unsigned char* shared;  // [N / 8][Threads] of eight bfloat16, [Threads] of two maxima
  int left;               // tiles until the sums are taken
  bool any;

  CUKIT_DEVICE explicit KeptSums(unsigned char* first) : shared(first) {}

  // For the next queries.
  CUKIT_DEVICE void clear() {
    left = Period;
    any = false;
  }

  // Once a tile.
  CUKIT_DEVICE bool due() {
    if (--left > 0) return false;
    left = Period;
    return true;
  }

  // Adds them to `sums`, which are relative to rows.max.
  CUKIT_DEVICE void add_to(float (&sums)[N], const SoftmaxRows& rows, float scale_log2) const {
    const float2 before = *maxima();
    const uint4* const outputs = this->outputs();
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
    *maxima() = make_float2(rows.max[0], rows.max[1]);
    uint4* const outputs = this->outputs();
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

 private:
  // Worked out where they are needed: registers are short.
  CUKIT_DEVICE static int thread() { return threadIdx.x - kWarpgroupThreads; }
  CUKIT_DEVICE uint4* outputs() const { return reinterpret_cast<uint4*>(shared) + thread(); }
  CUKIT_DEVICE float2* maxima() const {
    return reinterpret_cast<float2*>(shared + N / 8 * Threads * sizeof(uint4)) + thread();
  }
};

}  // namespace cukit
