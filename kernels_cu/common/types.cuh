// Element types and 16-byte vectors.
//
// A kernel is specialised by -DDTYPE=float32|float16|bfloat16; cukit::element_t is that type.
// Arithmetic is in float: to_float after loads, from_float (round to nearest even) before stores.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cache_policy.cuh"
#include "common/ptx/pack.cuh"

namespace cukit {

using float32 = float;
using float16 = __half;
using bfloat16 = __nv_bfloat16;

#ifdef DTYPE
using element_t = DTYPE;
#endif

CUKIT_DEVICE float to_float(float x) { return x; }
CUKIT_DEVICE float to_float(__half x) { return __half2float(x); }
CUKIT_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
CUKIT_DEVICE T from_float(float x);
template <>
CUKIT_DEVICE float from_float<float>(float x) { return x; }
template <>
CUKIT_DEVICE __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
CUKIT_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// N consecutive elements, moved as one access when their bytes are 4, 8 or 16.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(sizeof(T) * N <= 16, "one access moves at most 16 bytes");
  T data[N];
  CUKIT_DEVICE T& operator[](int i) { return data[i]; }
  CUKIT_DEVICE const T& operator[](int i) const { return data[i]; }
};

template <typename T, int N>
CUKIT_DEVICE void to_floats(float (&into)[N], const Vec<T, N>& from) {
#pragma unroll
  for (int j = 0; j < N; ++j) into[j] = to_float(from[j]);
}

// A bfloat16 is the upper half of its float: one instruction per element; unpacking the pair first
// would cost an extra one for every second element.
template <int N>
CUKIT_DEVICE void to_floats(float (&into)[N], const Vec<bfloat16, N>& from) {
  if constexpr (N % 2 == 0) {
    const unsigned* pairs = reinterpret_cast<const unsigned*>(&from);
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      into[j] = __uint_as_float(pairs[j / 2] << 16);
      into[j + 1] = __uint_as_float(pairs[j / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) into[j] = to_float(from[j]);
  }
}

// Rounded to nearest even; 16-bit elements two at a time.
template <typename T, int N>
CUKIT_DEVICE void from_floats(Vec<T, N>& into, const float (&from)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    unsigned* pairs = reinterpret_cast<unsigned*>(&into);
#pragma unroll
    for (int j = 0; j < N; j += 2) pairs[j / 2] = pack<T>(from[j], from[j + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) into[j] = from_float<T>(from[j]);
  }
}

// Cache hints of a global access.
//   Cached: no hint; the default.
//   Kept: loads of 16 bytes only; L2 evicts these lines last. For the large inputs of a
//   memory-bound kernel: L2 then evicts the outputs in the order they are written (rms_norm on an
//   H200: 2 to 4 % faster).
//   Streaming: evicted first. Makes the same kernel 4 to 8 % slower, even for data that is used
//   once; useful only where it protects other data that is read again.
enum class Cache { Cached, Kept, Streaming };

namespace detail {
template <int Bytes>
struct Word;
template <>
struct Word<1> { using type = unsigned char; };
template <>
struct Word<2> { using type = unsigned short; };
template <>
struct Word<4> { using type = unsigned int; };
template <>
struct Word<8> { using type = uint2; };
template <>
struct Word<16> { using type = uint4; };
}  // namespace detail

template <Cache cache = Cache::Cached, typename T, int N>
CUKIT_DEVICE void load(Vec<T, N>& into, const T* from) {
  using W = typename detail::Word<sizeof(Vec<T, N>)>::type;
  const W* source = reinterpret_cast<const W*>(from);
  W& word = *reinterpret_cast<W*>(&into);
  if constexpr (cache == Cache::Streaming) {
    word = __ldcs(source);
  } else if constexpr (cache == Cache::Kept && sizeof(W) == 16) {
    word = load_global_16(source, create_policy_evict_last());
  } else {
    word = *source;
  }
}

template <Cache cache = Cache::Cached, typename T, int N>
CUKIT_DEVICE void store(T* to, const Vec<T, N>& from) {
  using W = typename detail::Word<sizeof(Vec<T, N>)>::type;
  const W word = *reinterpret_cast<const W*>(&from);
  if (cache == Cache::Streaming) {
    __stcs(reinterpret_cast<W*>(to), word);
  } else {
    *reinterpret_cast<W*>(to) = word;
  }
}

}  // namespace cukit
