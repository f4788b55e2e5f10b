// The functions that translated inline PTX of third-party sources calls
// (cukit/emulator/inline_ptx.py).
//
// A register is a variable; an instruction interprets its bits as the instruction's type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/emulator/third_party.h"
#include "common/emulator/host_math.h"

namespace cukit::emulator::ptx {

// The low bits of a value, sign-extended if the type is signed.
template <typename To, typename From>
inline To get(const From& from) {
  if constexpr (sizeof(To) == sizeof(From)) {
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
  } else if constexpr (std::is_arithmetic_v<From> && std::is_arithmetic_v<To>) {
    return static_cast<To>(from);
  } else if constexpr (sizeof(To) < sizeof(From)) {
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
  } else {
    To to{};
    std::memcpy(&to, &from, sizeof(From));
    return to;
  }
}

// An array decays to the address of its first element.
template <typename To, typename From, std::size_t N>
inline To get(const From (&from)[N]) {
  return get<To>(static_cast<const From*>(from));
}

template <typename To, typename From>
inline void put(To& to, const From& value) {
  to = get<To>(value);
}

// unpack() splits a register into narrower ones, lowest part first; pack() is its inverse.
template <typename Whole, typename... Parts>
inline void unpack(const Whole& whole, Parts&... parts) {
  const auto* at = reinterpret_cast<const unsigned char*>(&whole);
  ((std::memcpy(&parts, at, sizeof(Parts)), at += sizeof(Parts)), ...);
}
template <typename Whole, typename... Parts>
inline void pack(Whole& whole, const Parts&... parts) {
  constexpr std::size_t kBytes = sizeof(Whole) / sizeof...(Parts);
  auto* at = reinterpret_cast<unsigned char*>(&whole);
  ((std::memcpy(at, &parts, kBytes), at += kBytes), ...);
}

inline unsigned block_threads() {
  const dim3 block = CUKIT_THREE_OF_SELF(dim3, block_dim);
  return block.x * block.y * block.z;
}
inline unsigned thread_number() {
  const dim3 block = CUKIT_THREE_OF_SELF(dim3, block_dim);
  const uint3 thread = CUKIT_THREE_OF_SELF(uint3, thread_index);
  return (thread.z * block.y + thread.y) * block.x + thread.x;
}

// Addresses ---------------------------------------------------------------------------------------

inline std::uint64_t to_shared(std::uint64_t generic) {
  return shared_address(reinterpret_cast<const void*>(generic));
}
inline std::uint64_t from_shared(std::uint64_t shared) {
  return reinterpret_cast<std::uint64_t>(shared_memory(static_cast<std::uint32_t>(shared), 1));
}
template <typename T>
inline T* generic_pointer(std::uint64_t address, unsigned count) {
  check_alignment(reinterpret_cast<void*>(address), sizeof(T) * count, "a PTX instruction");
  return reinterpret_cast<T*>(address);
}
template <typename T>
inline T* shared_pointer(std::uint64_t address, unsigned count) {
  const std::size_t bytes = sizeof(T) * count;
  return static_cast<T*>(shared_memory(static_cast<std::uint32_t>(address), bytes));
}

template <bool Ordered, typename T, typename... To>
inline void load(T* from, To&... to) {
  if constexpr (Ordered) {
    // The load may be in a loop that polls a value of another thread, and a plain load never lets
    // other threads run. An atomic that does not change the value does.
    ((put(to, atomic_update(from++, [](T old) { return old; }))), ...);
  } else {
    // put() sign- or zero-extends a value that is narrower than its register.
    ((put(to, *from++)), ...);
  }
}
template <bool Ordered, typename T, typename... From>
inline void store(T* to, const From&... from) {
  if constexpr (Ordered) {
    ((atomicExch(to++, get<T>(from))), ...);
  } else {
    ((*to++ = get<T>(from)), ...);
  }
}

// Arithmetic --------------------------------------------------------------------------------------

// Floats of 16 bits: one number, or a pair of them.
template <typename T>
inline constexpr bool kHalf = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
template <typename T>
inline constexpr bool kPair = std::is_same_v<T, __half2> || std::is_same_v<T, __nv_bfloat162>;

template <typename T>
inline double as_number(T x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(x);
  } else {
    return static_cast<double>(static_cast<float>(x));
  }
}
template <typename T>
inline bool is_nan(T x) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    const double number = as_number(x);
    return number != number;
  }
}
template <typename T>
inline T canonical_nan() {
  if constexpr (std::is_integral_v<T>) {
    return 0;
  } else if constexpr (kHalf<T>) {
    return get<T>(std::uint16_t{0x7fff});
  } else {
    return std::is_same_v<T, double> ? get<T>(0x7ff8000000000000ull) : get<T>(0x7fffffffu);
  }
}

// The result of an instruction with a rounding modifier, which the compiler must not contract.
template <typename T>
inline T rounded(T x) {
  __asm__("" : "+m"(x));
  return x;
}

// .sat: limits an integer to the range of its type, a float to [0, 1]; NaN becomes 0.
template <typename To, typename From>
inline To saturate(From x) {
  if constexpr (std::is_integral_v<To>) {
    return cukit_saturate<To>(static_cast<long double>(x));
  } else if constexpr (kPair<To>) {
    return To(saturate<decltype(To::x)>(x.x), saturate<decltype(To::y)>(x.y));
  } else {
    const double number = as_number(x);
    return number > 0 ? (number < 1 ? To(x) : To(1.0f)) : To(0.0f);
  }
}
// .relu: negative numbers become 0; NaN stays NaN.
template <typename T>
inline T relu(T x) {
  if constexpr (kPair<T>) {
    return T(relu(x.x), relu(x.y));
  } else if constexpr (std::is_integral_v<T>) {
    return x > 0 ? x : 0;
  } else {
    return is_nan(x) ? canonical_nan<T>() : as_number(x) > 0 ? x : T(0.0f);
  }
}

// The smaller (`Larger`: the larger) of two numbers; -0 is less than +0. If one of them is NaN, the
// result is the other one, or with .NaN (`PassNan`) NaN.
template <bool Larger, bool PassNan, typename T>
inline T extreme(T a, T b) {
  if constexpr (kPair<T>) {
    return T(extreme<Larger, PassNan>(a.x, b.x), extreme<Larger, PassNan>(a.y, b.y));
  } else {
    if (is_nan(a) || is_nan(b)) {
      return PassNan || (is_nan(a) && is_nan(b)) ? canonical_nan<T>() : is_nan(a) ? b : a;
    }
    bool less = false;
    if constexpr (std::is_integral_v<T>) {
      less = a < b;
    } else {
      const double left = as_number(a), right = as_number(b);
      less = left < right || (left == right && std::signbit(left) && !std::signbit(right));
    }
    return less == Larger ? b : a;
  }
}
template <typename T>
inline T absolute(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fabs(x);
  } else if constexpr (std::is_integral_v<T>) {
    return x < 0 ? T(-x) : x;
  } else {  // clears the sign bits
    using Bits = std::conditional_t<kPair<T>, std::uint32_t, std::uint16_t>;
    return get<T>(static_cast<Bits>(get<Bits>(x) & 0x7fff7fffu));
  }
}

// a * b + c, rounded once.
template <typename T>
inline T fused(T a, T b, T c) {
  if constexpr (kPair<T>) {
    return T(fused(a.x, b.x, c.x), fused(a.y, b.y, c.y));
  } else if constexpr (kHalf<T>) {  // the product is exact in a double
    return T(sum_to_odd(as_number(a) * as_number(b), as_number(c)));
  } else {
    return std::fma(a, b, c);
  }
}

// setp. If an operand is NaN, unordered comparisons are true and ordered ones false.
enum class Compare { eq, ne, lt, le, gt, ge, num, nan };
template <Compare C, bool Unordered, typename T>
inline bool compare(T a, T b) {
  if constexpr (kHalf<T>) {
    return compare<C, Unordered>(static_cast<float>(a), static_cast<float>(b));
  } else {
    const bool numbers = !is_nan(a) && !is_nan(b);
    if constexpr (C == Compare::num || C == Compare::nan) return numbers == (C == Compare::num);
    if (!numbers) return Unordered;
    switch (C) {
      case Compare::eq: return a == b;
      case Compare::ne: return a != b;
      case Compare::lt: return a < b;
      case Compare::le: return a <= b;
      case Compare::gt: return a > b;
      default: return a >= b;
    }
  }
}

template <typename T>
inline T absolute_difference(T a, T b) { return a > b ? T(a - b) : T(b - a); }
template <typename T>
inline T high_product(T a, T b) {
  using Wide = std::conditional_t<
      sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
      std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
  return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T)));
}
// Multiplies the low 24 bits. Returns bits 0 to 31 of the product, or (`High`) bits 16 to 47.
template <bool High, typename T>
inline T product_of_24_bits(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  const Wide product = static_cast<Wide>(static_cast<T>(a << 8) >> 8) * (static_cast<T>(b << 8) >> 8);
  return static_cast<T>(product >> (High ? 16 : 0));
}
// Shifts by at least the width return 0 or, to the right for negative numbers, -1.
template <typename T>
inline T shift_left(T x, std::uint32_t by) { return by >= 8 * sizeof(T) ? T(0) : T(x << by); }
template <typename T>
inline T shift_right(T x, std::uint32_t by) {
  return by >= 8 * sizeof(T) ? T(x < T(0) ? -1 : 0) : T(x >> by);
}
template <typename T>
inline unsigned popc(T x) { return static_cast<unsigned>(__builtin_popcountll(x)); }
template <typename T>
inline unsigned clz(T x) {
  return x == 0 ? 8 * sizeof(T)
                : static_cast<unsigned>(__builtin_clzll(static_cast<std::uint64_t>(x))) - (64 - 8 * sizeof(T));
}
// The position of the highest bit that differs from the sign (unsigned: of the highest set bit) or,
// with .shiftamt, the left shift that moves this bit to the top. All ones if there is no such bit.
template <typename T>
inline unsigned bfind(T x, bool shift_amount) {
  if (x < T(0)) x = static_cast<T>(~x);
  if (x == 0) return ~0u;
  return shift_amount ? clz(x) : static_cast<unsigned>(8 * sizeof(T) - 1 - clz(x));
}
template <typename T>
inline T brev(T x) {
  T reversed = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) reversed |= (x >> i & 1) << (8 * sizeof(T) - 1 - i);
  return reversed;
}
template <typename T>
inline T bfe(T x, std::uint32_t position, std::uint32_t length) {
  position &= 0xff, length &= 0xff;
  if (length == 0) return 0;
  constexpr unsigned kBits = 8 * sizeof(T);
  const unsigned top = position + length - 1 < kBits ? position + length - 1 : kBits - 1;
  if (position >= kBits) return shift_right(x, kBits);
  return shift_right(static_cast<T>(x << (kBits - 1 - top)), kBits - 1 - top + position);
}
template <typename T>
inline T bfi(T field, T into, std::uint32_t position, std::uint32_t length) {
  position &= 0xff, length &= 0xff;
  const T mask = shift_left(static_cast<T>(length >= 8 * sizeof(T) ? ~T(0) : (T(1) << length) - 1), position);
  return static_cast<T>((into & ~mask) | (shift_left(field, position) & mask));
}
// Bit i of the table is the result for inputs whose bits a, b, c form the number i.
inline std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c, unsigned table) {
  std::uint32_t result = 0;
  for (unsigned i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
inline std::uint32_t funnel_l(std::uint32_t low, std::uint32_t high, std::uint32_t by, bool clamp) {
  by = clamp ? (by < 32 ? by : 32) : by & 31;
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(high) << 32 | low) >> (32 - by));
}
inline std::uint32_t funnel_r(std::uint32_t low, std::uint32_t high, std::uint32_t by, bool clamp) {
  by = clamp ? (by < 32 ? by : 32) : by & 31;
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(high) << 32 | low) >> by);
}
template <typename A, typename B>
inline std::uint32_t dp4a(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  constexpr auto byte = [](std::uint32_t x, int i, bool is_signed) {
    const int value = static_cast<int>(x >> (8 * i) & 0xff);
    return is_signed && value > 127 ? value - 256 : value;
  };
  for (int i = 0; i < 4; ++i) {
    c += static_cast<std::uint32_t>(byte(a, i, std::is_signed_v<A>) * byte(b, i, std::is_signed_v<B>));
  }
  return c;
}

enum class Round { none, rni, rzi, rmi, rpi };

template <Round R>
inline double to_integer(double x) {
  switch (R) {
    case Round::rni: return rint(x);
    case Round::rzi: return trunc(x);
    case Round::rmi: return floor(x);
    case Round::rpi: return ceil(x);
    default: return x;
  }
}
template <typename To, Round R, bool Saturate, typename From>
inline To convert(From x) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    return Saturate ? saturate<To>(x) : static_cast<To>(x);
  } else if constexpr (std::is_integral_v<To>) {
    if (is_nan(x)) return cukit_from_nan<To, From>();
    return cukit_saturate<To>(to_integer<R>(as_number(x)));
  } else if constexpr (std::is_integral_v<From>) {
    return Saturate ? saturate<To>(static_cast<To>(x)) : static_cast<To>(x);
  } else {
    const double number = to_integer<R>(as_number(x));
    return static_cast<To>(Saturate ? saturate<double>(number) : number);
  }
}
template <typename Half, bool Relu>
inline std::uint32_t convert_two(float low, float high) {
  Half halves[2] = {Half(low), Half(high)};
  if constexpr (Relu) halves[0] = relu(halves[0]), halves[1] = relu(halves[1]);
  return get<std::uint32_t>(halves[0]) | get<std::uint32_t>(halves[1]) << 16;
}
// Rounded to the 19 bits that the tensor cores use, to nearest, ties away from zero.
inline std::uint32_t to_tf32(float x) {
  return is_nan(x) ? 0x7fffffffu : (get<std::uint32_t>(x) + 0x1000u) & ~0x1fffu;
}

// The number of bytes that cp.async reads. `operand`, which follows the size, is src-size or the
// predicate ignore-src.
template <typename T>
inline unsigned bytes_present(unsigned bytes, T operand) {
  if constexpr (std::is_same_v<T, bool>) {
    return operand ? 0 : bytes;
  } else {
    return static_cast<unsigned>(operand);
  }
}

// Warps -------------------------------------------------------------------------------------------

inline int shuffle_width(std::uint32_t clamp) { return 32 - static_cast<int>(clamp >> 8 & 31); }
inline std::uint32_t shuffle(WarpOp op, std::uint32_t mask, std::uint32_t value, std::uint32_t argument,
                             std::uint32_t clamp) {
  return ::cukit::emulator::shuffle(op, mask, value, argument, shuffle_width(clamp));
}
// Whether the source lane is within the segment.
inline bool shuffle_inside(WarpOp op, std::uint32_t argument, std::uint32_t clamp) {
  const unsigned width = static_cast<unsigned>(shuffle_width(clamp));
  const unsigned at = CUKIT_OF_SELF(lane) % width;
  switch (op) {
    case WarpOp::ShuffleUp: return at >= argument;
    case WarpOp::ShuffleDown: return at + argument < width;
    case WarpOp::ShuffleXor: return (at ^ argument) < width;
    default: return argument < width;
  }
}
inline bool elected(std::uint32_t mask) {
  sync_warp(mask);
  return (1u << CUKIT_OF_SELF(lane)) == (mask & (~mask + 1));
}

inline void mma(Number a_type, Number b_type, unsigned k, unsigned* d, const unsigned* a, const unsigned* b) {
  ::cukit::emulator::mma(a_type, b_type, k, d, a, b);
}
// Float16 accumulators: two per register, in the order of the float ones.
inline void mma_half(Number a_type, Number b_type, unsigned k, unsigned* d, const unsigned* a,
                     const unsigned* b) {
  float sums[4];
  for (int i = 0; i < 4; ++i) {
    sums[i] = static_cast<float>(get<__half>(static_cast<std::uint16_t>(d[i / 2] >> (16 * (i % 2)))));
  }
  ::cukit::emulator::mma(a_type, b_type, k, sums, a, b);
  for (int i = 0; i < 2; ++i) d[i] = convert_two<__half, false>(sums[2 * i], sums[2 * i + 1]);
}

[[noreturn]] inline void leave() { not_emulated("inline PTX: exit"); }

}  // namespace cukit::emulator::ptx
