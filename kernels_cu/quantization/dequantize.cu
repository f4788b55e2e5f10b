// Codes with scales per block: decoding (dequantize), and encoding with given scales
// (encode_scaled).
//
//   value = (code - zero point) * scale      code = round(value * (1 / scale) + zero point)
//
// Computed in float. Values are rounded to their dtype; codes are rounded half to even and
// saturate. When encoding, 1 / scale is 1 for zero and subnormal scales, and the integer code of a
// NaN is 0.
// Mapping: a thread processes ITEMS vectors of 16 bytes of values, THREADS apart, and loads all of
//   them before it uses the first.
// Shared memory: none.
// Macros: those of common/quant/codes.cuh and quantization/access.cuh; SCALE
//   float32|float16|bfloat16|int8; ZERO_POINT the same or `none`; BLOCK_ROWS, BLOCK_COLS: extents of
//   a block, 0: those in BlockedMatrices; ONE_SCALE 0|1: no vector spans two blocks; INDEX
//   uint32|uint64, which must hold the number of values that the grid's vectors cover; THREADS;
//   ITEMS.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/quantize.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/types.cuh"
#include "quantization/access.cuh"
#include "quantization/parameters.cuh"

namespace {

using namespace cukit;
using Index = index_t;
using T = element_t;
using int8 = signed char;
struct none {};
using Scale = SCALE;
using ZeroPoint = ZERO_POINT;

CUKIT_DEVICE float number(int8 x) { return x; }
template <typename Element>
CUKIT_DEVICE float number(Element x) { return to_float(x); }
template <typename Element>
constexpr bool kPresent = true;
template <>
constexpr bool kPresent<none> = false;

constexpr float kSmallestScale = 1.17549435e-38f;  // the smallest normal float

struct Factors {
  float scale, zero_point;

  CUKIT_DEVICE float value(float code) const { return __fmul_rn(code - zero_point, scale); }

  // 1 / scale; 1 for zero and subnormal scales.
  CUKIT_DEVICE float inverse() const {
    return 1.0f / (fabsf(scale) < kSmallestScale ? 1.0f : scale);
  }
  CUKIT_DEVICE float scaled(float x, float inverse) const {
    const float multiple = __fmul_rn(x, inverse);
    return without_nan(kPresent<ZeroPoint> ? __fadd_rn(multiple, zero_point) : multiple);
  }
};

// A vector of values: its row, counted over all matrices, its first column, and the number of
// values from there to the end of the row; `count` is 0 beyond the last row.
struct Place {
  Index row, col;
  long long count;
};

// The vectors of one thread, and the factors of their values.
class Places {
 public:
  CUKIT_DEVICE Places(const BlockedMatrices& at, const Scale* scales, const ZeroPoint* zero_points)
      : at_(at),
        scales_(scales),
        zero_points_(zero_points),
        vectors_(static_cast<Index>((at.cols + kValues - 1) / kValues)),
        first_(static_cast<Index>(blockIdx.x) * (THREADS * ITEMS) + threadIdx.x) {}

  CUKIT_DEVICE Place operator[](int j) const {
    const Index index = first_ + j * THREADS;
    const Index row = index / vectors_;
    const Index col = (index - row * vectors_) * kValues;
    const bool exists = row < static_cast<Index>(at_.rows * at_.num_matrices);
    return {row, col, exists ? at_.cols - col : 0};
  }

  CUKIT_DEVICE long long value(const Place& place) const { return place.row * at_.cols + place.col; }
  CUKIT_DEVICE long long byte(const Place& place) const {
    return place.row * at_.storage_cols + place.col / kCodesPerByte;
  }

  // Calls f(i, factors, 1 / scale) for every value of a vector.
  template <typename F>
  CUKIT_DEVICE void each(const Place& place, F f) const {
    const Index rows = static_cast<Index>(at_.rows);
    const Index matrix = place.row / rows;
    const Index block_rows = BLOCK_ROWS ? BLOCK_ROWS : static_cast<Index>(at_.block_rows);
    const Index down = (place.row - matrix * rows) / block_rows;
    const long long line = matrix * at_.scale_matrix + down * at_.scale_down;
    if constexpr (ONE_SCALE) {
      const Factors shared = factors(line, place.col);
      const float inverse = shared.inverse();
#pragma unroll
      for (int i = 0; i < kValues; ++i) f(i, shared, inverse);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (i >= place.count) continue;
        const Factors own = factors(line, place.col + i);
        f(i, own, own.inverse());
      }
    }
  }

 private:
  CUKIT_DEVICE Factors factors(long long line, Index col) const {
    const Index block_cols = BLOCK_COLS ? BLOCK_COLS : static_cast<Index>(at_.block_cols);
    const long long index = line + col / block_cols * at_.scale_across;
    float zero_point = 0.0f;
    if constexpr (kPresent<ZeroPoint>) zero_point = number(zero_points_[index]);
    return {number(scales_[index]), zero_point};
  }

  const BlockedMatrices& at_;
  const Scale* scales_;
  const ZeroPoint* zero_points_;
  Index vectors_, first_;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(
    T* __restrict__ values,                     // [num_matrices, rows, cols]
    const unsigned char* __restrict__ storage,  // [num_matrices, rows, storage_cols]
    const Scale* __restrict__ scales,           // [num_matrices, blocks_down, blocks_across], any strides
    const ZeroPoint* __restrict__ zero_points,  // with the strides of scales; null for none
    const __grid_constant__ BlockedMatrices at) {
  const Places places(at, scales, zero_points);
  Codes codes[ITEMS];
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    codes[j] = load_codes(storage + places.byte(places[j]), places[j].count);
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const Place place = places[j];
    if (place.count <= 0) continue;
    float x[kValues];
    decode_values(x, codes[j]);
    places.each(place, [&](int i, const Factors& factors, float) { x[i] = factors.value(x[i]); });
    store_values(values + places.value(place), x, place.count);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) encode_scaled(
    const T* __restrict__ values,               // [num_matrices, rows, cols]
    unsigned char* __restrict__ storage,        // [num_matrices, rows, storage_cols]
    const Scale* __restrict__ scales,           // [num_matrices, blocks_down, blocks_across], any strides
    const ZeroPoint* __restrict__ zero_points,  // with the strides of scales; null for none
    const __grid_constant__ BlockedMatrices at) {
  const Places places(at, scales, zero_points);
  Values vectors[ITEMS];
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    vectors[j] = load_values(values + places.value(places[j]), places[j].count);
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const Place place = places[j];
    if (place.count <= 0) continue;
    float x[kValues] = {};
    places.each(place, [&](int i, const Factors& factors, float inverse) {
      x[i] = factors.scaled(to_float(vectors[j][i]), inverse);
    });
    store_codes(storage + places.byte(place), encode_values(x), place.count);
  }
}
