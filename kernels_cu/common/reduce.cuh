// Sums and maxima over a warp and over a block, in a fixed order: the same input gives the same bits.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct Sum {
  static constexpr float identity = 0.0f;
  CUKIT_DEVICE static float combine(float a, float b) { return a + b; }
};

struct Max {
  static constexpr float identity = -__builtin_huge_valf();
  CUKIT_DEVICE static float combine(float a, float b) { return fmaxf(a, b); }
};

// Every lane gets the result over `Lanes` neighbouring lanes (a power of two).
template <typename Op, int Lanes = kWarpSize>
CUKIT_DEVICE float warp_reduce(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    value = Op::combine(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// Every thread of the block gets the result. All threads must call it. `scratch` holds
// Threads / 32 floats of shared memory; two barriers, so it may be reused at once.
template <typename Op, int Threads>
CUKIT_DEVICE float block_reduce(float value, float* scratch) {
  static_assert(Threads % kWarpSize == 0, "whole warps only");
  constexpr int kWarps = Threads / kWarpSize;
  value = warp_reduce<Op>(value);
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = Op::identity;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) value = Op::combine(value, scratch[i]);
    __syncthreads();
  }
  return value;
}

}  // namespace cukit
