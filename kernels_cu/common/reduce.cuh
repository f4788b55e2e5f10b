// Sums and maxima over a warp and over a block, prefix sums over a warp, in a fixed order: the same
// input gives the same bits.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct Sum {
  CUKIT_DEVICE static float identity() { return 0.0f; }
  CUKIT_DEVICE static float combine(float a, float b) { return a + b; }
};

struct Max {
  CUKIT_DEVICE static float identity() { return -infinity(); }
  CUKIT_DEVICE static float combine(float a, float b) { return fmaxf(a, b); }
};

// Maximum of the bits of non-negative floats: NaN is above infinity, which is above every number,
// so that no NaN is lost. The identity is 0.
struct MaxBits {
  CUKIT_DEVICE static int identity() { return 0; }
  CUKIT_DEVICE static int combine(int a, int b) { return max(a, b); }
};

// Every lane gets the result over `Lanes` neighbouring lanes (a power of two).
template <typename Op, int Lanes = kWarpSize, typename T>
CUKIT_DEVICE T warp_reduce(T value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    value = Op::combine(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// Sum of `value` over the lanes before this one. All lanes must call it.
CUKIT_DEVICE int warp_sum_before(int value) {
  const int lane = threadIdx.x % kWarpSize;
  int upto = value;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_up_sync(kFullMask, upto, distance);
    if (lane >= distance) upto += other;
  }
  return upto - value;
}

// Every thread of the block gets all N results. All threads must call it. `scratch` holds
// N * Threads / 32 values in shared memory; the second barrier allows reusing it immediately.
template <typename Op, int Threads, int N, typename T>
CUKIT_DEVICE void block_reduce(T (&values)[N], T* scratch) {
  static_assert(Threads % kWarpSize == 0, "whole warps only");
  constexpr int kWarps = Threads / kWarpSize;
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = warp_reduce<Op>(values[n]);
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    if (lane == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) scratch[n * kWarps + warp] = values[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      // Each warp reduces the warps' results again: one read per lane instead of kWarps per thread.
      const T partial = lane < kWarps ? scratch[n * kWarps + lane] : Op::identity();
      values[n] = warp_reduce<Op>(partial);
    }
    __syncthreads();
  }
}

template <typename Op, int Threads, typename T>
CUKIT_DEVICE T block_reduce(T value, T* scratch) {
  T values[1] = {value};
  block_reduce<Op, Threads>(values, scratch);
  return values[0];
}

}  // namespace cukit
