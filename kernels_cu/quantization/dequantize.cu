// Values of codes whose blocks share scales: (code - zero point) * scale in float, then rounded to the
// dtype of the values.
//
// Mapping: a thread takes ITEMS vectors of 16 bytes of values, THREADS apart, and loads the codes of
//   all before it uses the first.
// Shared memory: none.
// Macros: those of common/quant/codes.cuh and quantization/access.cuh; SCALE and ZERO_POINT (or `none`) are
//   float32|float16|bfloat16|int8 of the factors; BLOCK_ROWS, BLOCK_COLS: extents of a block, 0 for
//   any; ONE_SCALE 0|1: a vector lies in one block; INDEX uint32|uint64: holds the number of values
//   of the vectors of a whole grid; THREADS; ITEMS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/quantize.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/types.cuh"
#include "quantization/access.cuh"
#include "quantization/parameters.cuh"

namespace {

using cukit::kValues;
using Index = cukit::index_t;
using T = cukit::element_t;
using int8 = signed char;
struct none {};
using cukit::bfloat16;
using cukit::float16;
using cukit::float32;
using Scale = SCALE;
using ZeroPoint = ZERO_POINT;

CUKIT_DEVICE float number(int8 x) { return x; }
template <typename Element>
CUKIT_DEVICE float number(Element x) { return cukit::to_float(x); }
template <typename Element>
constexpr bool kPresent = true;
template <>
constexpr bool kPresent<none> = false;

struct Factors {
  float scale, zero_point;

  CUKIT_DEVICE float value(float code) const { return __fmul_rn(code - zero_point, scale); }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(
    T* __restrict__ values,                     // [num_matrices, rows, cols]
    const unsigned char* __restrict__ storage,  // [num_matrices, rows, storage_cols]
    const Scale* __restrict__ scales,           // [num_matrices, blocks_down, blocks_across], any strides
    const ZeroPoint* __restrict__ zero_points,  // with the strides of scales; null for none
    const __grid_constant__ cukit::BlockedMatrices at) {
  const Index rows = static_cast<Index>(at.rows);
  const Index block_rows = BLOCK_ROWS ? BLOCK_ROWS : static_cast<Index>(at.block_rows);
  const Index block_cols = BLOCK_COLS ? BLOCK_COLS : static_cast<Index>(at.block_cols);
  const Index vectors = static_cast<Index>((at.cols + kValues - 1) / kValues);  // of a row
  const Index first = static_cast<Index>(blockIdx.x) * (THREADS * ITEMS) + threadIdx.x;

  // Of this thread's j-th vector.
  struct Place {
    Index row, col;
    long long count;  // of values to the end of the row
  };
  const auto place = [&](int j) {
    const Index index = first + j * THREADS;
    const Index row = index / vectors;
    const Index col = (index - row * vectors) * kValues;
    return Place{row, col, row < rows * at.num_matrices ? at.cols - col : 0};
  };

  cukit::Codes codes[ITEMS];
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const Place here = place(j);
    const unsigned char* row = storage + here.row * at.storage_cols;
    codes[j] = cukit::load_codes(row + here.col / cukit::kCodesPerByte, here.count);
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const Place here = place(j);
    if (here.count <= 0) continue;
    const Index matrix = here.row / rows;
    const Index down = (here.row - matrix * rows) / block_rows;
    const long long line = matrix * at.scale_matrix + down * at.scale_down;
    const auto factors = [&](Index col) {
      const long long index = line + col / block_cols * at.scale_across;
      float zero_point = 0.0f;
      if constexpr (kPresent<ZeroPoint>) zero_point = number(zero_points[index]);
      return Factors{number(scales[index]), zero_point};
    };
    float x[kValues];
    cukit::decode_values(x, codes[j]);
    if constexpr (ONE_SCALE) {
      const Factors shared = factors(here.col);
#pragma unroll
      for (int i = 0; i < kValues; ++i) x[i] = shared.value(x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (i < here.count) x[i] = factors(here.col + i).value(x[i]);
      }
    }
    cukit::store_values(values + here.row * at.cols + here.col, x, here.count);
  }
}
