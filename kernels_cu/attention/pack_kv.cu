// Quantises full groups of 16-bit keys and values to int4 codes in the blocks of a cache (KIVI).
//
//   for each set: low = min x, high = max x
//   scale = (high - low) / 15, at least max |x| / 1024 and 2^-14, at most 65504   (float16)
//   zero = -8 - low / scale   (float16)
//   code = round(x / scale + zero), from -8 to 7;  x ~ (code - zero) * scale
//
// A set is one channel of keys over GROUP tokens, or one token of values over all columns of a
// head. The quantisation is asymmetric, since all elements of a key channel may be far from zero.
// Every operation rounds as in the reference. A set with a non-finite element gets the scale NaN.
// Groups with an index out of range are skipped.
// Paper: Liu et al., KIVI, arXiv:2402.02750.
// Mapping: one thread block per group and head. Keys are staged in shared memory, and each thread
//   finds the extremes of a channel; kTeam threads process a token of values, eight columns per
//   thread.
// Shared memory, dynamic: GROUP * (HEAD_DIM + 8) elements for keys, 2 * HEAD_DIM floats.
// Macros: DTYPE float16|bfloat16; GROUP; HEAD_DIM, VALUE_DIM multiples of 8; INDEX int32|int64;
//   THREADS.
// Minimum architecture: sm_80. Deterministic.
// Reference: cukit/reference/pack_kv.py.
#include "attention/parameters.cuh"
#include "common/index.cuh"
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using index_t = cukit::INDEX;

constexpr int kChunk = 8;  // 16 bytes of elements, one word of codes
constexpr int kPitch = HEAD_DIM + kChunk;
constexpr float kMinScale = 6.103515625e-5f;  // the smallest normal float16
constexpr float kMaxScale = 65504.0f;
constexpr int kTeam = VALUE_DIM <= 8 ? 1 : VALUE_DIM <= 16 ? 2 : VALUE_DIM <= 32 ? 4 : VALUE_DIM <= 64 ? 8
                    : VALUE_DIM <= 128 ? 16 : 32;  // threads per token of values

struct Factors {
  __half scale, zero;
  float inverse;

  CUKIT_DEVICE Factors(float low, float high, bool finite) {
    const float most = fmaxf(fabsf(low), fabsf(high));
    float value = fmaxf(fmaxf(__fsub_rn(high, low) / 15.0f, most / 1024.0f), kMinScale);
    value = fminf(value, kMaxScale);
    scale = __float2half_rn(finite ? value : __int_as_float(0x7fc00000));
    inverse = 1.0f / __half2float(scale);
    zero = __float2half_rn(__fsub_rn(-8.0f, __fmul_rn(low, inverse)));
  }
};

CUKIT_DEVICE unsigned encode(float x, float inverse, float zero) {
  const float code = rintf(__fadd_rn(__fmul_rn(x, inverse), zero));
  // fmaxf replaces a NaN code by -8.
  return static_cast<unsigned>(static_cast<int>(fminf(fmaxf(code, -8.0f), 7.0f))) & 15u;
}

struct Extremes {
  float low = cukit::infinity();
  float high = -cukit::infinity();
  bool finite = true;

  CUKIT_DEVICE void take(float x) {
    low = fminf(low, x);
    high = fmaxf(high, x);
    finite = finite && fabsf(x) < cukit::infinity();
  }
};

struct Place {
  int block, row;

  // The place of group `index`, with `in_block` groups per block.
  CUKIT_DEVICE Place(long long index, int in_block)
      : block(static_cast<int>(index / in_block)),
        row(static_cast<int>(index % in_block) * GROUP) {}
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) pack_kv(
    const T* __restrict__ k,              // [source_blocks, source_rows, heads, HEAD_DIM]
    const T* __restrict__ v,              // the same, [..., VALUE_DIM]
    const index_t* __restrict__ sources,  // [num_groups]: indices of groups of GROUP rows
    const index_t* __restrict__ targets,  // [num_groups]
    unsigned char* __restrict__ k_cache,  // [num_blocks, block_size, heads, HEAD_DIM / 2]
    unsigned char* __restrict__ v_cache,  // the same, [..., VALUE_DIM / 2]
    __half* __restrict__ k_scales,        // [num_blocks, block_size / GROUP, heads, HEAD_DIM]
    __half* __restrict__ k_zeros,         // the same
    __half* __restrict__ v_scales,        // [num_blocks, block_size, heads]
    __half* __restrict__ v_zeros,         // the same
    const __grid_constant__ cukit::PackParameters params) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  T* const tile = reinterpret_cast<T*>(shared);
  float* const inverses = reinterpret_cast<float*>(tile + GROUP * kPitch);
  float* const zeros = inverses + HEAD_DIM;

  const int head = blockIdx.x % params.heads;
  const int group = blockIdx.x / params.heads;
  const long long source = sources[group];
  const long long target = targets[group];
  if (source < 0 || source >= params.source_groups || target < 0 || target >= params.target_groups) {
    return;
  }
  const Place from(source, params.source_block_groups);
  const Place to(target, params.target_block_groups);

  constexpr int kChunks = HEAD_DIM / kChunk;
  for (int i = threadIdx.x; i < GROUP * kChunks; i += THREADS) {
    const int row = i / kChunks;
    const int column = i % kChunks * kChunk;
    cukit::Vec<T, kChunk> values;
    cukit::load(values, k + cukit::offset_of(params.k, from.block, from.row + row, head) + column);
    cukit::store(tile + row * kPitch + column, values);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < HEAD_DIM; column += THREADS) {
    Extremes seen;
#pragma unroll 8
    for (int row = 0; row < GROUP; ++row) seen.take(cukit::to_float(tile[row * kPitch + column]));
    const Factors factors(seen.low, seen.high, seen.finite);
    const long long at =
        cukit::offset_of(params.k_factors, to.block, to.row / GROUP, head) + column;
    k_scales[at] = factors.scale;
    k_zeros[at] = factors.zero;
    inverses[column] = factors.inverse;
    zeros[column] = __half2float(factors.zero);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * kChunks; i += THREADS) {
    const int row = i / kChunks;
    const int column = i % kChunks * kChunk;
    cukit::Vec<T, kChunk> values;
    cukit::load(values, tile + row * kPitch + column);
    unsigned codes = 0;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      codes |= encode(cukit::to_float(values[j]), inverses[column + j], zeros[column + j]) << 4 * j;
    }
    unsigned char* const row_codes =
        k_cache + cukit::offset_of(params.k_cache, to.block, to.row + row, head);
    *reinterpret_cast<unsigned*>(row_codes + column / 2) = codes;
  }

  const int lane = threadIdx.x % kTeam;
  const int column = lane * kChunk;
  static_assert(THREADS % kTeam == 0 && GROUP % (THREADS / kTeam) == 0,
                "the rows divide evenly among the teams");
#pragma unroll 1
  for (int row = threadIdx.x / kTeam; row < GROUP; row += THREADS / kTeam) {
    float values[kChunk] = {};
    Extremes seen;
    if (column < VALUE_DIM) {
      cukit::Vec<T, kChunk> loaded;
      cukit::load(loaded, v + cukit::offset_of(params.v, from.block, from.row + row, head) + column);
      cukit::to_floats(values, loaded);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) seen.take(values[j]);
    }
    const float low = -cukit::warp_reduce<cukit::Max, kTeam>(-seen.low);
    const float high = cukit::warp_reduce<cukit::Max, kTeam>(seen.high);
    const bool finite = cukit::warp_reduce<cukit::Max, kTeam>(seen.finite ? 0.0f : 1.0f) == 0.0f;
    const Factors factors(low, high, finite);
    const float zero = __half2float(factors.zero);
    unsigned codes = 0;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) codes |= encode(values[j], factors.inverse, zero) << 4 * j;
    if (column >= VALUE_DIM) continue;
    unsigned char* const row_codes =
        v_cache + cukit::offset_of(params.v_cache, to.block, to.row + row, head);
    *reinterpret_cast<unsigned*>(row_codes + column / 2) = codes;
    if (lane == 0) {
      const long long at = cukit::offset_of(params.v_factors, to.block, to.row + row, head);
      v_scales[at] = factors.scale;
      v_zeros[at] = factors.zero;
    }
  }
}
