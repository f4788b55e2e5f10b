// Parts of CUDA C++ that this project's own kernels do not need. Third-party sources are compiled
// with this header prepended (cukit/emulator/builder.py).
#pragma once

// Included before platform.h, whose macros clash with names in these headers.
#include "common/emulator/host_math.h"

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cassert>
#include <cfloat>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <math.h>
#include <type_traits>
#include <utility>
#ifdef CUKIT_EMULATOR_HOST_LIBRARY  // streams, strings, complex numbers: 50 ms of every compilation
#include <complex>
#endif

#include "common/platform.cuh"
#include "common/emulator/entry.h"
#include "common/emulator/inline_ptx.h"

// Inline PTX has been translated; remaining asm is the host's.
#undef asm
#undef __constant__
#define __constant__ static
#define __managed__
#define __nv_pure__

#define __CUDACC__ 1
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __CUDA_ARCH_LIST__ CUKIT_EMULATE
#ifndef CUDART_INF_F
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#endif

// Lookup of kernels and variables by name ---------------------------------------------------------

namespace cukit::emulator {

struct Registered {
  const char* name;
  const void* address;
  std::size_t bytes;
  const Registered* next;
};
static const Registered* registered = nullptr;

struct RegisteredKernel : Registered {
  Entry entry;
  RegisteredKernel(const char* name, const Entry& of) : Registered{name, &entry, 0, registered}, entry(of) {
    registered = this;
  }
};
struct RegisteredVariable : Registered {
  RegisteredVariable(const char* name, const volatile void* address, std::size_t bytes)
      : Registered{name, const_cast<const void*>(address), bytes, registered} {
    registered = this;
  }
};

}  // namespace cukit::emulator

#define CUKIT_EMULATOR_JOIN(a, b) CUKIT_EMULATOR_JOIN_(a, b)
#define CUKIT_EMULATOR_JOIN_(a, b) a##b
#define CUKIT_EMULATOR_KERNEL(function, name)                                                      \
  static const ::cukit::emulator::RegisteredKernel CUKIT_EMULATOR_JOIN(cukit_kernel_, __COUNTER__)( \
      #name, ::cukit::emulator::EntryOf<&function>::value());
#define CUKIT_EMULATOR_TEMPLATE(name, ...)                                                         \
  static const ::cukit::emulator::RegisteredKernel CUKIT_EMULATOR_JOIN(cukit_kernel_, __COUNTER__)( \
      name, ::cukit::emulator::EntryOf<&__VA_ARGS__>::value());
#define CUKIT_EMULATOR_VARIABLE(variable, name)                                                        \
  static const ::cukit::emulator::RegisteredVariable CUKIT_EMULATOR_JOIN(cukit_variable_, __COUNTER__)( \
      #name, &variable, sizeof(variable));

// Types -------------------------------------------------------------------------------------------

using uint = unsigned;
using uchar = unsigned char;
using ushort = unsigned short;
using ulong = unsigned long;

namespace cuda::std {
using namespace ::std;
}

// Arithmetic --------------------------------------------------------------------------------------

// min and max of two different types, like CUDA's overloads.
#define CUKIT_MIXED(name, compare)                                                                   \
  template <typename A, typename B,                                                                  \
            ::std::enable_if_t<::std::is_arithmetic_v<A> && ::std::is_arithmetic_v<B> &&             \
                                   !::std::is_same_v<A, B>, int> = 0>                                \
  inline ::std::common_type_t<A, B> name(A a, B b) {                                                 \
    using T = ::std::common_type_t<A, B>;                                                            \
    return static_cast<T>(a) compare static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);      \
  }
CUKIT_MIXED(min, <)
CUKIT_MIXED(max, >)
#undef CUKIT_MIXED

inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long llmin(long long a, long long b) { return a < b ? a : b; }
inline long long llmax(long long a, long long b) { return a > b ? a : b; }

inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline int __hadd(int a, int b) { return static_cast<int>((static_cast<long long>(a) + b) >> 1); }
inline int __rhadd(int a, int b) { return static_cast<int>((static_cast<long long>(a) + b + 1) >> 1); }
inline unsigned __uhadd(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) + b) >> 1);
}
inline unsigned __urhadd(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) + b + 1) >> 1);
}
inline unsigned __sad(int a, int b, unsigned c) {
  return static_cast<unsigned>(a > b ? a - b : b - a) + c;
}
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return (a > b ? a - b : b - a) + c; }
inline unsigned long long __brevll(unsigned long long x) { return ::cukit::emulator::ptx::brev(x); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return ::cukit::emulator::ptx::funnel_l(low, high, shift, true);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return ::cukit::emulator::ptx::funnel_r(low, high, shift, true);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return ::cukit::emulator::ptx::dp4a<std::uint8_t, std::uint8_t>(a, b, c);
}
// The position of the offset-th set bit at or above `base`, or at or below it if offset < 0; the bit at
// `base` if offset is 0.
inline unsigned __fns(unsigned mask, unsigned base, int offset) {
  const int step = offset < 0 ? -1 : 1;
  int left = offset == 0 ? 1 : offset * step;
  for (int i = static_cast<int>(base); i >= 0 && i < 32; i += step) {
    if ((mask >> i & 1) && --left == 0) return i;
    if (offset == 0) break;
  }
  return ~0u;
}

// SIMD operations on four bytes or two halfwords.
#define CUKIT_PACKED(name, Part, expression)                                        \
  inline unsigned name(unsigned x, unsigned y) {                                    \
    constexpr int kParts = 4 / sizeof(Part);                                        \
    unsigned result = 0;                                                            \
    for (int i = 0; i < kParts; ++i) {                                              \
      const int shift = 32 / kParts * i;                                            \
      const int a = static_cast<Part>(x >> shift), b = static_cast<Part>(y >> shift); \
      const unsigned part = static_cast<std::make_unsigned_t<Part>>(expression);    \
      result |= part << shift;                                                      \
    }                                                                               \
    return result;                                                                  \
  }
CUKIT_PACKED(__vadd4, std::uint8_t, a + b)
CUKIT_PACKED(__vadd2, std::uint16_t, a + b)
CUKIT_PACKED(__vsub4, std::uint8_t, a - b)
CUKIT_PACKED(__vsub2, std::uint16_t, a - b)
CUKIT_PACKED(__vminu4, std::uint8_t, a < b ? a : b)
CUKIT_PACKED(__vmaxu4, std::uint8_t, a > b ? a : b)
CUKIT_PACKED(__vmins4, std::int8_t, a < b ? a : b)
CUKIT_PACKED(__vmaxs4, std::int8_t, a > b ? a : b)
CUKIT_PACKED(__vmins2, std::int16_t, a < b ? a : b)
CUKIT_PACKED(__vmaxs2, std::int16_t, a > b ? a : b)
CUKIT_PACKED(__vabsdiffu4, std::uint8_t, a > b ? a - b : b - a)
CUKIT_PACKED(__vcmpeq4, std::uint8_t, a == b ? 0xff : 0)
CUKIT_PACKED(__vavgu4, std::uint8_t, (a + b + 1) / 2)
#undef CUKIT_PACKED

inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(static_cast<std::uint64_t>(static_cast<unsigned>(high)) << 32 |
                                                     static_cast<unsigned>(low)));
}
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __drcp_rn(double x) { return 1.0 / x; }
namespace cukit::emulator {
// Rounds `exact` towards `side`, given `nearest`, its rounding to nearest: moves `nearest` by one
// ulp if it is on the wrong side.
inline float toward(double exact, float nearest, float side) {
  const double error = exact - nearest;
  if (!(error < 0 || error > 0)) return nearest;  // exact, infinite or NaN
  if (side == 0) return (error < 0) == (nearest > 0) ? nextafterf(nearest, 0) : nearest;
  return (error > 0) == (side > 0) ? nextafterf(nearest, side) : nearest;
}
}  // namespace cukit::emulator
#define CUKIT_DOWN_AND_UP(name, arguments, exact)                                                         \
  inline float name##_rd arguments { return ::cukit::emulator::toward(exact, float(exact), -INFINITY); } \
  inline float name##_ru arguments { return ::cukit::emulator::toward(exact, float(exact), INFINITY); }
#define CUKIT_DIRECTED(name, arguments, exact)                                                      \
  inline float name##_rz arguments { return ::cukit::emulator::toward(exact, float(exact), 0); } \
  CUKIT_DOWN_AND_UP(name, arguments, exact)
// __fadd_rz is in arithmetic.h.
CUKIT_DOWN_AND_UP(__fadd, (float a, float b), ::cukit::emulator::sum_to_odd(a, b))
CUKIT_DIRECTED(__fsub, (float a, float b), ::cukit::emulator::sum_to_odd(a, -b))
CUKIT_DIRECTED(__fmul, (float a, float b), (double(a) * double(b)))
CUKIT_DIRECTED(__fdiv, (float a, float b), (double(a) / double(b)))
CUKIT_DIRECTED(__fmaf, (float a, float b, float c), ::cukit::emulator::sum_to_odd(double(a) * double(b), c))
CUKIT_DIRECTED(__frcp, (float x), (1.0 / double(x)))
CUKIT_DIRECTED(__fsqrt, (float x), (sqrt(double(x))))
CUKIT_DIRECTED(__int2float, (int x), (double(x)))
CUKIT_DIRECTED(__uint2float, (unsigned x), (double(x)))
CUKIT_DIRECTED(__double2float, (double x), (x))
#undef CUKIT_DIRECTED
#undef CUKIT_DOWN_AND_UP

#define CUKIT_DOUBLE_TO(name, To)                                      \
  inline To name##_rn(double x) { return cukit_saturate<To>(rint(x)); }  \
  inline To name##_rz(double x) { return cukit_saturate<To>(trunc(x)); } \
  inline To name##_rd(double x) { return cukit_saturate<To>(floor(x)); } \
  inline To name##_ru(double x) { return cukit_saturate<To>(ceil(x)); }
CUKIT_DOUBLE_TO(__double2int, int)
CUKIT_DOUBLE_TO(__double2uint, unsigned)
CUKIT_DOUBLE_TO(__double2ll, long long)
CUKIT_DOUBLE_TO(__double2ull, unsigned long long)
#undef CUKIT_DOUBLE_TO
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }

inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline double rcbrt(double x) { return 1.0 / cbrt(x); }
inline float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }
inline double rhypot(double x, double y) { return 1.0 / hypot(x, y); }
inline float norm3df(float x, float y, float z) { return sqrtf(x * x + y * y + z * z); }
inline float rnorm3df(float x, float y, float z) { return 1.0f / norm3df(x, y, z); }
inline float norm4df(float x, float y, float z, float w) { return sqrtf(x * x + y * y + z * z + w * w); }
inline double norm3d(double x, double y, double z) { return sqrt(x * x + y * y + z * z); }
inline double sinpi(double x) { return sin(3.14159265358979323846 * x); }
inline double cospi(double x) { return cos(3.14159265358979323846 * x); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
inline void sincospi(double x, double* s, double* c) { *s = sinpi(x), *c = cospi(x); }
// erfc(x) exp(x^2); an asymptotic series where erfc(x) underflows.
inline double erfcx(double x) {
  const double square = x * x;
  if (x < -27) return INFINITY;
  if (x < 25) return exp(square) * (1 + fma(x, x, -square)) * erfc(x);
  double sum = 1;
  for (int n = 10; n > 0; --n) sum = 1 - (2 * n - 1) / (2 * square) * sum;
  return 0.56418958354775628 / x * sum;
}
inline float erfcxf(float x) { return static_cast<float>(erfcx(x)); }
// Newton iterations from a logarithmic initial value; as accurate as erf.
inline double erfinv(double y) {
  if (!(y > -1 && y < 1)) return y == 1 ? INFINITY : y == -1 ? -INFINITY : NAN;
  const double w = log(1 - y * y), t = 2 / (3.14159265358979323846 * 0.147) + w / 2;
  double x = copysign(sqrt(sqrt(t * t - w / 0.147) - t), y);
  for (int i = 0; i < 4; ++i) x -= (erf(x) - y) / (1.1283791670955126 * exp(-x * x));
  return x;
}
inline float erfinvf(float y) { return static_cast<float>(erfinv(y)); }
// Newton iterations on log(erfc(x)) where 1 - y would lose digits of y.
inline double erfcinv(double y) {
  if (!(y > 0 && y < 0.25)) return erfinv(1 - y);
  double x = sqrt(-log(y));
  for (int i = 0; i < 8; ++i) {
    const double excess = log(erfcx(x)) - x * x - log(y);
    x += excess * erfcx(x) / 1.1283791670955126;
  }
  return x;
}
inline float erfcinvf(float y) { return static_cast<float>(erfcinv(y)); }
inline double normcdfinv(double y) { return -1.4142135623730951 * erfcinv(2 * y); }
inline float normcdfinvf(float y) { return static_cast<float>(normcdfinv(y)); }
inline float __tanhf(float x) { return tanhf(x); }

#define CUKIT_HALF_MATH(name, function)                                                        \
  inline __half h##name(__half x) { return __float2half(function(__half2float(x))); }           \
  inline __nv_bfloat16 h##name(__nv_bfloat16 x) {                                               \
    return __float2bfloat16(function(__bfloat162float(x)));                                     \
  }                                                                                             \
  inline __half2 h2##name(__half2 x) { return __halves2half2(h##name(x.x), h##name(x.y)); }      \
  inline __nv_bfloat162 h2##name(__nv_bfloat162 x) {                                            \
    return __halves2bfloat162(h##name(x.x), h##name(x.y));                                      \
  }
CUKIT_HALF_MATH(exp, expf)
CUKIT_HALF_MATH(exp2, exp2f)
CUKIT_HALF_MATH(exp10, exp10f)
CUKIT_HALF_MATH(log, logf)
CUKIT_HALF_MATH(log2, log2f)
CUKIT_HALF_MATH(log10, log10f)
CUKIT_HALF_MATH(sqrt, sqrtf)
CUKIT_HALF_MATH(rsqrt, rsqrtf)
CUKIT_HALF_MATH(rcp, 1.0f /)
CUKIT_HALF_MATH(sin, sinf)
CUKIT_HALF_MATH(cos, cosf)
CUKIT_HALF_MATH(tanh, tanhf)
CUKIT_HALF_MATH(floor, floorf)
CUKIT_HALF_MATH(ceil, ceilf)
CUKIT_HALF_MATH(trunc, truncf)
CUKIT_HALF_MATH(rint, rintf)
#undef CUKIT_HALF_MATH

// Memory ------------------------------------------------------------------------------------------

// Adds component by component: vector accesses are not atomic as a whole on the GPU either.
#define CUKIT_VECTOR_ADD(Vector, ...)                                                  \
  inline Vector atomicAdd(Vector* to, Vector by) {                                     \
    ::cukit::emulator::check_alignment(to, alignof(Vector), "atomicAdd of a vector");  \
    return {__VA_ARGS__};                                                              \
  }
CUKIT_VECTOR_ADD(float2, atomicAdd(&to->x, by.x), atomicAdd(&to->y, by.y))
CUKIT_VECTOR_ADD(float4, atomicAdd(&to->x, by.x), atomicAdd(&to->y, by.y), atomicAdd(&to->z, by.z),
                 atomicAdd(&to->w, by.w))
#undef CUKIT_VECTOR_ADD

inline std::size_t __cvta_shared_to_generic(std::size_t address) {
  return ::cukit::emulator::ptx::from_shared(address);
}
inline unsigned __isShared(const void* pointer) {
  return ::cukit::emulator::in_shared_memory(pointer);
}
inline unsigned __isGlobal(const void* pointer) { return !__isShared(pointer); }
inline void __prefetch_global_l1(const void*) {}
inline void __prefetch_global_l2(const void*) {}
inline void __brkpt() {}

// Textures are not emulated. A fetch ends the launch with an error that names it.
#define CUKIT_NO_TEXTURE(name)                                                                       \
  template <typename T = float, typename... Arguments>                                               \
  inline T name(Arguments...) {                                                                      \
    ::cukit::emulator::not_emulated(#name ": textures and surfaces; read the array through a pointer"); \
  }
CUKIT_NO_TEXTURE(tex1D)
CUKIT_NO_TEXTURE(tex1Dfetch)
CUKIT_NO_TEXTURE(tex1DLod)
CUKIT_NO_TEXTURE(tex2D)
CUKIT_NO_TEXTURE(tex2DLod)
CUKIT_NO_TEXTURE(tex2DLayered)
CUKIT_NO_TEXTURE(tex2Dgather)
CUKIT_NO_TEXTURE(tex3D)
CUKIT_NO_TEXTURE(texCubemap)
CUKIT_NO_TEXTURE(surf1Dread)
CUKIT_NO_TEXTURE(surf1Dwrite)
CUKIT_NO_TEXTURE(surf2Dread)
CUKIT_NO_TEXTURE(surf2Dwrite)
CUKIT_NO_TEXTURE(surf3Dread)
CUKIT_NO_TEXTURE(surf3Dwrite)
#undef CUKIT_NO_TEXTURE
