// CUDA's integer, float and conversion functions that a host compiler lacks.
//
// Functions that the GPU approximates call the host's math library: results differ by the GPU's
// error (docs/emulator.md).
#pragma once

#include <cstdint>
#include <cstring>

#include "common/emulator/host_math.h"

// Bits --------------------------------------------------------------------------------------------

namespace cukit::emulator {

// The same bits as another type.
template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace cukit::emulator

inline float __int_as_float(int x) { return ::cukit::emulator::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return ::cukit::emulator::bit_cast<float>(x); }
inline int __float_as_int(float x) { return ::cukit::emulator::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return ::cukit::emulator::bit_cast<unsigned>(x); }
inline double __longlong_as_double(long long x) { return ::cukit::emulator::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return ::cukit::emulator::bit_cast<long long>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
namespace cukit::emulator {

// prmt.b32: if the highest bit of a selector nibble is set, the byte's sign bit is replicated.
inline unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xffu;
    if (choice & 8) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

}  // namespace cukit::emulator

// CUDA's __byte_perm ignores the highest bit of each selector nibble.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  return ::cukit::emulator::permute_bytes(low, high, selector & 0x7777u);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<std::int8_t>(a >> (8 * i)) * static_cast<std::int8_t>(b >> (8 * i));
  }
  return c;
}

// Minimum and maximum of CUDA's argument types; mixed signs compare as unsigned, as in CUDA.
#define CUKIT_MIN_MAX(T, A, B)                  \
  inline T min(A a, B b) {                      \
    const T left = static_cast<T>(a);           \
    const T right = static_cast<T>(b);          \
    return left < right ? left : right;         \
  }                                             \
  inline T max(A a, B b) {                      \
    const T left = static_cast<T>(a);           \
    const T right = static_cast<T>(b);          \
    return left > right ? left : right;         \
  }
CUKIT_MIN_MAX(int, int, int)
CUKIT_MIN_MAX(unsigned, unsigned, unsigned)
CUKIT_MIN_MAX(unsigned, int, unsigned)
CUKIT_MIN_MAX(unsigned, unsigned, int)
CUKIT_MIN_MAX(long, long, long)
CUKIT_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUKIT_MIN_MAX(long long, long long, long long)
CUKIT_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef CUKIT_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Float -------------------------------------------------------------------------------------------

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float normcdff(float x) {
  return static_cast<float>(0.5 * erfc(-static_cast<double>(x) * 0.70710678118654752440));
}
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float sinpif(float x) { return sinf(3.14159265358979f * x); }
inline float cospif(float x) { return cosf(3.14159265358979f * x); }
// The GPU's fast division returns 0 for huge divisors; this one divides.
inline float fdividef(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
// The _rn forms are never contracted into fused operations: the result is opaque to the compiler.
inline float cukit_rounded(float x) {
  __asm__("" : "+m"(x));
  return x;
}
namespace cukit::emulator {

// a + b, rounded to odd: an inexact sum has an odd last bit. Rounding it to a float or
// 16-bit float then gives the same result as rounding the exact sum.
inline double sum_to_odd(double a, double b) {
  const double sum = a + b, other = sum - a;
  const double lost = (a - (sum - other)) + (b - other);
  const bool inexact = lost < 0 || lost > 0;  // not NaN
  if (!inexact || (__double_as_longlong(sum) & 1)) return sum;
  return nextafter(sum, lost > 0 ? INFINITY : -INFINITY);
}

}  // namespace cukit::emulator
inline float __fadd_rn(float a, float b) { return cukit_rounded(a + b); }
// Rounds towards zero. A double holds the exact sum of floats whose exponents differ by less than
// 29; otherwise `lost` has the sign of the exact sum minus the double.
inline float __fadd_rz(float a, float b) {
  const double sum = static_cast<double>(a) + b, other = sum - a;
  const double lost = (a - (sum - other)) + (b - other);
  const float nearest = static_cast<float>(sum);
  const double over = nearest - sum;
  const bool away = sum > 0 ? over > 0 || (over == 0 && lost < 0) : over < 0 || (over == 0 && lost > 0);
  return away ? nextafterf(nearest, 0.0f) : nearest;
}
inline float __fsub_rn(float a, float b) { return cukit_rounded(a - b); }
inline float __fmul_rn(float a, float b) { return cukit_rounded(a * b); }
inline float __fdiv_rn(float a, float b) { return cukit_rounded(a / b); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// NaN converted to an integer, as on the GPU: 0, or the highest bit alone if one of the types has 64
// bits.
template <typename To, typename From>
constexpr To cukit_from_nan() {
  return sizeof(To) == 8 || sizeof(From) == 8 ? static_cast<To>(1ull << (8 * sizeof(To) - 1)) : To(0);
}
// Conversions saturate.
template <typename To, typename From>
inline To cukit_saturate(From x) {
  constexpr To kLow = static_cast<To>(To(-1) < To(0) ? To(1) << (8 * sizeof(To) - 1) : To(0));
  constexpr To kHigh = static_cast<To>(~kLow);
  if (!(x == x)) return cukit_from_nan<To, From>();
  if (x <= static_cast<From>(kLow)) return kLow;
  return x >= static_cast<From>(kHigh) ? kHigh : static_cast<To>(x);
}
#define CUKIT_FLOAT_TO(name, To)                                                          \
  inline To name##_rn(float x) { return cukit_saturate<To>(rintf(x)); }                   \
  inline To name##_rz(float x) { return cukit_saturate<To>(truncf(x)); }                  \
  inline To name##_rd(float x) { return cukit_saturate<To>(floorf(x)); }                  \
  inline To name##_ru(float x) { return cukit_saturate<To>(ceilf(x)); }
CUKIT_FLOAT_TO(__float2int, int)
CUKIT_FLOAT_TO(__float2uint, unsigned)
CUKIT_FLOAT_TO(__float2ll, long long)
CUKIT_FLOAT_TO(__float2ull, unsigned long long)
#undef CUKIT_FLOAT_TO
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
