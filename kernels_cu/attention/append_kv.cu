// Writes new keys and values into the blocks of a cache, after RoPE of the queries and keys.
//
//   row slots[i] % block_size of block slots[i] / block_size  <-  k[i], v[i]
//
// RoPE as in layers/rope.cu, in float; codes as in common/quant/scales.cuh, with one scale for the
// key and one for the value of each token and head. Tokens whose slot does not exist are skipped.
// Papers: Kwon et al., arXiv:2309.06180 (slots); Su et al., arXiv:2104.09864 (RoPE).
// Mapping: TEAM neighbouring threads process one head of a token: of q, of k or of v, in this
//   order. A thread holds two chunks of eight elements; in the rotated columns, both elements of
//   each RoPE pair.
// Macros: DTYPE float16|bfloat16; CODE 0 caches of DTYPE, 1 e4m3, 2 int8; 1 and 2 need the macros
//   of common/quant/scales.cuh; HEADS_Q 0 or more; HEADS_KV; HEAD_DIM, VALUE_DIM multiples of 8;
//   ROTARY_DIM 0 or a multiple of 16; INTERLEAVED 0|1: pairs (x[2i], x[2i + 1]) instead of
//   (x[i], x[i + ROTARY_DIM / 2]); SLOT, ID int32|int64 of slots and positions; TEAM a power of two
//   up to 32; THREADS.
// No shared memory. Minimum architecture: sm_80. Deterministic.
// Reference: cukit/reference/append_kv.py.
#include "attention/parameters.cuh"
#include "common/index.cuh"
#include "common/platform.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#if CODE
#include "common/quant/scales.cuh"
#endif

namespace {

using T = cukit::element_t;
using slot_t = cukit::SLOT;
#if CODE
using cache_t = unsigned char;
#else
using cache_t = T;
#endif

constexpr int kChunk = 8;
constexpr int kRotatingLanes = ROTARY_DIM / (2 * kChunk);
constexpr int kHeads = HEADS_Q + 2 * HEADS_KV;

// A lane's two chunks of a head of `width` elements.
struct Chunks {
  int first, second;  // elements
  bool rotates;
  float x[2 * kChunk];

  CUKIT_DEVICE Chunks(const T* from, int width, bool exists, bool has_rope) {
    const int lane = threadIdx.x % TEAM;
    const bool paired = lane < kRotatingLanes;
    first = kChunk * (paired ? lane : 2 * lane);
    second = kChunk * (paired ? lane + kRotatingLanes : 2 * lane + 1);
    rotates = paired && has_rope;
    if (!exists) first = second = width;
    read(0, from, first, width);
    read(kChunk, from, second, width);
    width_ = width;
  }

  // `cosines`, `sines`: table rows of the token's position. Null for a position out of range: the
  // result is NaN.
  CUKIT_DEVICE void rotate(const float* cosines, const float* sines) {
    if (!rotates) return;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      // Pair j: neighbours within the chunks, or one element of each chunk.
      const int a = INTERLEAVED ? 2 * j : j;
      const int b = INTERLEAVED ? 2 * j + 1 : j + kChunk;
      const int angle = !INTERLEAVED ? first + j : (j < 4 ? first : second - kChunk) / 2 + j;
      const float nan = __int_as_float(0x7fffffff);
      const float cosine = cosines == nullptr ? nan : cosines[angle];
      const float sine = cosines == nullptr ? nan : sines[angle];
      const float rotated = x[a] * cosine - x[b] * sine;
      x[b] = x[b] * cosine + x[a] * sine;
      x[a] = rotated;
    }
  }

  CUKIT_DEVICE void store(T* to) const {
    write(to, 0, first);
    write(to, kChunk, second);
  }

#if CODE
  // All lanes of the warp must call it. `exists`: whether there is a row to write.
  CUKIT_DEVICE void store_codes(unsigned char* to, float* scale, bool exists) const {
    cukit::Extremes extremes;
#pragma unroll
    for (int j = 0; j < 2 * kChunk; ++j) extremes.take(x[j]);
    extremes.bits[0] = cukit::warp_reduce<cukit::MaxBits, TEAM>(extremes.bits[0]);
    if (!exists) return;
    const cukit::Factors factors = cukit::factors_of(extremes);
    if (threadIdx.x % TEAM == 0) *scale = factors.value();
    float scaled[2 * kChunk];
#pragma unroll
    for (int j = 0; j < 2 * kChunk; ++j) {
      scaled[j] = cukit::without_nan(factors.inverse.scaled(x[j]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = half == 0 ? first : second;
      if (column >= width_) continue;
      cukit::Vec<unsigned, 2> codes;
      codes[0] = cukit::encode_group(scaled + kChunk * half);
      codes[1] = cukit::encode_group(scaled + kChunk * half + 4);
      cukit::store(reinterpret_cast<unsigned*>(to + column), codes);
    }
  }
#endif

 private:
  CUKIT_DEVICE void read(int at, const T* from, int column, int width) {
    cukit::Vec<T, kChunk> chunk{};
    if (column < width) cukit::load(chunk, from + column);
    cukit::to_floats(reinterpret_cast<float(&)[kChunk]>(x[at]), chunk);
  }

  CUKIT_DEVICE void write(T* to, int at, int column) const {
    if (column >= width_) return;
    cukit::Vec<T, kChunk> chunk;
    cukit::from_floats(chunk, reinterpret_cast<const float(&)[kChunk]>(x[at]));
    cukit::store(to + column, chunk);
  }

  int width_;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) append_kv(
    const T* q,                                     // [num_tokens, HEADS_Q, HEAD_DIM]
    const T* __restrict__ k,                        // [num_tokens, HEADS_KV, HEAD_DIM]
    const T* __restrict__ v,                        // [num_tokens, HEADS_KV, VALUE_DIM]
    const slot_t* __restrict__ slots,               // [num_tokens]
    const float* __restrict__ cos,                  // [max_positions, ROTARY_DIM / 2]
    const float* __restrict__ sin,                  // the same
    const cukit::id_t* __restrict__ position_ids,   // [num_tokens]
    cache_t* __restrict__ k_cache,                  // [num_blocks, block_size, HEADS_KV, HEAD_DIM]
    cache_t* __restrict__ v_cache,                  // the same, [..., VALUE_DIM]
    float* __restrict__ k_scales,                   // with CODE: [num_blocks, block_size, HEADS_KV]
    float* __restrict__ v_scales,                   // the same
    T* q_out,                                       // as q; may be q itself
    const __grid_constant__ cukit::AppendParameters params) {
  const unsigned team = blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
  const int token = static_cast<int>(team / kHeads);
  int head = static_cast<int>(team % kHeads);
  const bool is_query = head < HEADS_Q;
  const bool is_value = head >= HEADS_Q + HEADS_KV;
  head -= is_query ? 0 : is_value ? HEADS_Q + HEADS_KV : HEADS_Q;

  bool exists = token < params.num_tokens;
  unsigned slot = 0;
  if (exists && !is_query) {
    const long long given = slots[token];
    exists = given >= 0 && given < static_cast<long long>(params.num_blocks) * params.block_size;
    if (exists) slot = static_cast<unsigned>(given);
  }
  const T* from = is_query ? q : is_value ? v : k;
  const cukit::HeadStrides& strides = is_query ? params.q : is_value ? params.v : params.k;
  if (exists) from += cukit::offset_of(strides, 0, token, head);
  Chunks chunks(from, is_value ? VALUE_DIM : HEAD_DIM, exists, ROTARY_DIM > 0 && !is_value);
  if constexpr (ROTARY_DIM > 0) {
    if (exists && chunks.rotates) {
      const long long position = position_ids[token];
      const bool known = position >= 0 && position < params.max_positions;
      const long long row = position * (ROTARY_DIM / 2);
      chunks.rotate(known ? cos + row : nullptr, known ? sin + row : nullptr);
    }
  }

  if (is_query) {
    if (exists) chunks.store(q_out + cukit::offset_of(params.q_out, 0, token, head));
#if !CODE
    return;
#endif
  }
  const int block = static_cast<int>(slot / static_cast<unsigned>(params.block_size));
  const int row = static_cast<int>(slot % static_cast<unsigned>(params.block_size));
  cache_t* to = (is_value ? v_cache : k_cache) +
                cukit::offset_of(is_value ? params.v_cache : params.k_cache, block, row, head);
#if CODE
  float* scale = (is_value ? v_scales : k_scales) +
                 cukit::offset_of(is_value ? params.v_scales : params.k_scales, block, row, head);
  chunks.store_codes(to, scale, exists && !is_query);
#else
  if (exists) chunks.store(to);
#endif
}
