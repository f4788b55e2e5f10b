// One scale per tensor: the extremes of its parts (tensor_extremes), then the scale and the codes
// (tensor_codes). Equations and rounding: common/quant/scales.cuh.
//
// Mapping: `parts` thread blocks share a tensor; in every round a block processes THREADS * ITEMS
//   consecutive vectors of 16 bytes. tensor_codes runs the rounds backwards, starting with the data
//   that tensor_extremes left in L2. Each of its blocks combines all extremes of its tensor, which
//   needs no initialisation and no atomics.
// Shared memory: THREADS / 32 words, twice that with ZERO_POINTS, static.
// Macros: those of common/quant/scales.cuh and quantization/access.cuh; THREADS a multiple of 32;
//   ITEMS: vectors that a thread loads at once.
// Minimum architecture: sm_80 (FP8 rounding is done in software before sm_89). Deterministic.
// Reference: cukit/reference/quantize.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/quant/scales.cuh"
#include "common/types.cuh"
#include "quantization/access.cuh"
#include "quantization/parameters.cuh"

namespace {

using cukit::Extremes;
using cukit::kValues;
using T = cukit::element_t;

constexpr long long kRound = THREADS * ITEMS * kValues;  // values per thread block and round

// Calls f(values of ITEMS vectors, index of the first value) for every round of this block. A
// thread's vectors are THREADS vectors apart.
template <bool Backwards, typename F>
CUKIT_DEVICE void rounds(const T* tensor, const cukit::WholeTensors& at, F f) {
  const long long count = (at.size + kRound - 1) / kRound;
  for (long long i = blockIdx.x; i < count; i += at.parts) {
    const long long first = (Backwards ? count - 1 - i : i) * kRound + threadIdx.x * kValues;
    cukit::Values values[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const long long index = first + j * THREADS * kValues;
      values[j] = cukit::load_values(tensor + index, at.size - index);
    }
    f(values, first);
  }
}

CUKIT_DEVICE void combine(Extremes& extremes, int* scratch) {
  cukit::block_reduce<cukit::MaxBits, THREADS>(extremes.bits, scratch);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) tensor_extremes(
    const T* __restrict__ x,    // [num_tensors, size]
    int* __restrict__ partial,  // [num_tensors, parts, 1], with ZERO_POINTS [.., 2]
    const __grid_constant__ cukit::WholeTensors at) {
  __shared__ int scratch[Extremes::kCount * THREADS / cukit::kWarpSize];
  Extremes extremes;
  rounds<false>(x + blockIdx.y * at.size, at, [&](const cukit::Values (&values)[ITEMS], long long) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) extremes.take(cukit::to_float(values[j][i]));
    }
  });
  combine(extremes, scratch);
  if (threadIdx.x < Extremes::kCount) {
    const long long part = static_cast<long long>(blockIdx.y) * at.parts + blockIdx.x;
    partial[part * Extremes::kCount + threadIdx.x] = extremes.bits[threadIdx.x];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) tensor_codes(
    const T* __restrict__ x,                // [num_tensors, size]
    unsigned char* __restrict__ storage,    // [num_tensors, code_bytes]
    cukit::scale_t* __restrict__ scales,    // [num_tensors]
    signed char* __restrict__ zero_points,  // [num_tensors]; null without ZERO_POINTS
    const int* __restrict__ partial,        // from tensor_extremes
    const __grid_constant__ cukit::WholeTensors at) {
  __shared__ int scratch[Extremes::kCount * THREADS / cukit::kWarpSize];
  const int* parts = partial + static_cast<long long>(blockIdx.y) * at.parts * Extremes::kCount;
  Extremes extremes;
  for (int i = threadIdx.x; i < at.parts; i += THREADS) {
#pragma unroll
    for (int j = 0; j < Extremes::kCount; ++j) {
      extremes.bits[j] = max(extremes.bits[j], parts[i * Extremes::kCount + j]);
    }
  }
  combine(extremes, scratch);
  const cukit::Factors factors = cukit::factors_of(extremes);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    scales[blockIdx.y] = factors.scale;
    if constexpr (ZERO_POINTS) zero_points[blockIdx.y] = static_cast<signed char>(factors.inverse.zero_point);
  }
  unsigned char* codes = storage + blockIdx.y * at.code_bytes;
  rounds<true>(x + blockIdx.y * at.size, at,
               [&](const cukit::Values (&values)[ITEMS], long long first) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const long long index = first + j * THREADS * kValues;
      float scaled[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) scaled[i] = factors.inverse.scaled(cukit::to_float(values[j][i]));
      cukit::store_codes(codes + index / cukit::kCodesPerByte, cukit::encode_values(scaled, factors.inverse.finite()),
                         at.size - index);
    }
  });
}
