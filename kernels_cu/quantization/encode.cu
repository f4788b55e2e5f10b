// Conversion between floats and 8-bit or 4-bit codes, without scales.
//
//   encode: nearest, ties to even, saturating;  decode: exact
//
// Formats: FP8 e4m3 (finite) and e5m2, Micikevicius et al., arXiv:2209.05433; int8; int4, two per
//   byte, the first in the low bits, each row of `extent` values padded to `cols` bytes.
// Mapping with VEC > 1, for rows without padding: a block converts THREADS * VECS_PER_THREAD
//   consecutive vectors of VEC values, thread t vectors t, t + THREADS, ..., and issues all loads
//   before the first use. Consecutive threads access consecutive 16 bytes of the values: with more
//   bytes per thread a warp's stores have gaps, and L2 writes partial sectors. Threads of block 0
//   also convert the values after the last full vector.
// Mapping with VEC 1, for any alignment and padding: one byte (encode) or one value (decode) per step,
//   in the same order.
// Shared memory: none.
// Macros: FORMAT E4M3|E5M2|INT8|INT4; DTYPE float32|float16|bfloat16, of the values; VEC 1 or 16 /
//   sizeof(DTYPE), which needs values aligned to 16 bytes and storage to the size of VEC codes;
//   THREADS; VECS_PER_THREAD; INDEX uint32|uint64, which must hold the number of values plus one
//   block's.
// Minimum architecture: sm_80 (FP8 rounding is done in software before sm_89). Deterministic.
// Reference: cukit/reference/narrow.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/store_global.cuh"
#include "common/quant/codes.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Index = cukit::index_t;

constexpr int kPerByte = cukit::kCodesPerByte;

using cukit::kGroup;
using Group = cukit::CodeGroup;
constexpr int kGroups = VEC > kGroup ? VEC / kGroup : 1;  // per vector

// A 32-bit word of values: one float32 or two 16-bit values.
template <typename Element>
CUKIT_DEVICE unsigned word_of(const float* x) {
  if constexpr (sizeof(Element) == 4) {
    return __float_as_uint(*x);
  } else {
    return cukit::pack<Element>(x[0], x[1]);
  }
}

// Encodes the first kPerByte values into a byte; values at `count` and beyond are taken as 0.
CUKIT_DEVICE unsigned char encode_byte(const T* values, long long count) {
  float x[kGroup] = {};
#pragma unroll
  for (int i = 0; i < kPerByte; ++i) {
    if (i < count) x[i] = cukit::without_nan(cukit::to_float(values[i]));
  }
  return static_cast<unsigned char>(cukit::encode_group(x));
}

// Decodes the value at `position` of `storage`.
CUKIT_DEVICE T decode_value(const unsigned char* storage, long long position) {
  float x[kGroup];
  cukit::decode_group(x, storage[position / kPerByte]);
  return cukit::from_float<T>(kPerByte > 1 && position % kPerByte ? x[1] : x[0]);
}

// Index of this thread's first vector, or with VEC 1 of its first byte (encode) or value (decode).
CUKIT_DEVICE Index first_index() {
  return static_cast<Index>(blockIdx.x) * (THREADS * VECS_PER_THREAD) + threadIdx.x;
}

// Row and column, in rows of `width`, of items THREADS apart, without a division per item.
struct Position {
  Index width, row, col, rows_step, cols_step;

  CUKIT_DEVICE Position(Index index, Index width)
      : width(width),
        row(index / width),
        col(index % width),
        rows_step(THREADS / width),
        cols_step(THREADS % width) {}

  CUKIT_DEVICE void advance() {
    row += rows_step, col += cols_step;
    if (col >= width) col -= width, ++row;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) encode(
    const T* __restrict__ values,         // [rows, extent]
    unsigned char* __restrict__ storage,  // [rows, cols]; VEC > 1: rows is 1
    long long rows, long long extent, long long cols) {
  const Index first = first_index();
  if constexpr (VEC == 1) {
    Position at(first, static_cast<Index>(cols));
    unsigned char bytes[VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i, at.advance()) {
      if (first + i * THREADS >= rows * cols) continue;
      const long long col = static_cast<long long>(at.col) * kPerByte;
      bytes[i] = encode_byte(values + at.row * extent + col, extent - col);
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const Index index = first + i * THREADS;
      if (index < rows * cols) storage[index] = bytes[i];
    }
  } else {
    const long long num_vecs = extent / VEC;
    cukit::Vec<T, VEC> vecs[VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const Index index = first + i * THREADS;
      if (index < num_vecs) {
        cukit::load(vecs[i], values + static_cast<long long>(index) * VEC);
      }
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const Index index = first + i * THREADS;
      if (index >= num_vecs) break;
      cukit::Vec<Group, kGroups> codes;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        float x[kGroup];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          x[k] = cukit::without_nan(cukit::to_float(vecs[i][j * kGroup + k]));
        }
        codes[j] = static_cast<Group>(cukit::encode_group(x));
      }
      cukit::store(reinterpret_cast<Group*>(storage) + static_cast<long long>(index) * kGroups, codes);
    }
    const long long rest = num_vecs * VEC + threadIdx.x * kPerByte;
    if (blockIdx.x == 0 && rest < extent) {
      storage[rest / kPerByte] = encode_byte(values + rest, extent - rest);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode(
    T* __restrict__ values,                     // [rows, extent]
    const unsigned char* __restrict__ storage,  // [rows, cols]; VEC > 1: rows is 1
    long long rows, long long extent, long long cols) {
  const Index first = first_index();
  if constexpr (VEC == 1) {
    Position at(first, static_cast<Index>(extent));
    T decoded[VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i, at.advance()) {
      if (first + i * THREADS >= rows * extent) continue;
      decoded[i] = decode_value(storage + at.row * cols, at.col);
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const Index index = first + i * THREADS;
      if (index < rows * extent) values[index] = decoded[i];
    }
  } else {
    const long long num_vecs = extent / VEC;
    cukit::Vec<Group, kGroups> codes[VECS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const Index index = first + i * THREADS;
      if (index < num_vecs) {
        cukit::load<cukit::Cache::Streaming>(
            codes[i],
            reinterpret_cast<const Group*>(storage) + static_cast<long long>(index) * kGroups);
      }
    }
#pragma unroll
    for (int i = 0; i < VECS_PER_THREAD; ++i) {
      const Index index = first + i * THREADS;
      if (index >= num_vecs) break;
      float x[kGroups * kGroup];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) cukit::decode_group(x + j * kGroup, codes[i][j]);
      constexpr int kWord = VEC / 4;
      cukit::store_global_16(reinterpret_cast<uint4*>(values) + index,
                             make_uint4(word_of<T>(x), word_of<T>(x + kWord),
                                        word_of<T>(x + 2 * kWord), word_of<T>(x + 3 * kWord)));
    }
    const long long rest = num_vecs * VEC + threadIdx.x;
    if (blockIdx.x == 0 && rest < extent) values[rest] = decode_value(storage, rest);
  }
}
