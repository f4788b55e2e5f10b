// float32 values to float8 or int4 bytes, and back.
//
//   encode: nearest, ties to even, saturating;  decode: exact
//
// Formats: float8 e4m3 (finite) and e5m2, Micikevicius et al., arXiv:2209.05433; int4, two to a byte,
//   the first in the low bits.
// Mapping: blockIdx.x and a thread's VEC bytes run along a row, blockIdx.y over rows.
// Shared memory: none.
// Macros: FORMAT 0 e4m3, 1 e5m2, 2 int4; VEC bytes a thread, 1|2|4, dividing cols; THREADS.
// Minimum architecture: sm_80 (float8 rounding is done in software before sm_89). Deterministic.
// Reference: cukit/reference/narrow.py.
#include "common/platform.cuh"
#include "common/types.cuh"

#include <cuda_fp8.h>

namespace {

constexpr int kValuesPerByte = FORMAT == 2 ? 2 : 1;

CUKIT_DEVICE unsigned char nibble(float x) {
  const float bounded = fminf(fmaxf(rintf(x), -8.0f), 7.0f);
  return static_cast<unsigned char>(x == x ? static_cast<int>(bounded) & 15 : 0);
}

CUKIT_DEVICE unsigned char float8(float x) {
  constexpr __nv_fp8_interpretation_t kFormat = FORMAT == 0 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kFormat);
}

CUKIT_DEVICE float float8_value(unsigned char bits) {
  constexpr __nv_fp8_interpretation_t kFormat = FORMAT == 0 ? __NV_E4M3 : __NV_E5M2;
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, kFormat)));
}

CUKIT_DEVICE float nibble_value(int bits) { return static_cast<float>((bits ^ 8) - 8); }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) encode(
    const float* __restrict__ values,      // [rows, extent]
    unsigned char* __restrict__ storage,   // [rows, cols]
    long long rows, long long cols, long long extent) {
  const long long col = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  if (col >= cols) return;
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    const float* from = values + row * extent;
    cukit::Vec<unsigned char, VEC> bytes;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const long long index = (col + i) * kValuesPerByte;
      if constexpr (FORMAT == 2) {
        const float second = index + 1 < extent ? from[index + 1] : 0.0f;
        bytes[i] = nibble(from[index]) | (nibble(second) << 4);
      } else {
        bytes[i] = float8(from[index]);
      }
    }
    cukit::store(storage + row * cols + col, bytes);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode(
    float* __restrict__ values,                  // [rows, extent]
    const unsigned char* __restrict__ storage,   // [rows, cols]
    long long rows, long long cols, long long extent) {
  const long long col = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * VEC;
  if (col >= cols) return;
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    float* to = values + row * extent;
    cukit::Vec<unsigned char, VEC> bytes;
    cukit::load(bytes, storage + row * cols + col);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const long long index = (col + i) * kValuesPerByte;
      if constexpr (FORMAT == 2) {
        to[index] = nibble_value(bytes[i] & 15);
        if (index + 1 < extent) to[index + 1] = nibble_value(bytes[i] >> 4);
      } else {
        to[index] = float8_value(bytes[i]);
      }
    }
  }
}
