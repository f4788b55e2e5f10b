// Replaces CuPy's header: `complex<T>` with arithmetic between precisions and with real numbers.
#pragma once

#include <complex>
#include <type_traits>

// The functions of std::complex are found by argument-dependent lookup.
using ::std::complex;
using ::std::polar;

namespace cukit::emulator {

template <typename T>
struct RealOf { using type = T; };
template <typename T>
struct RealOf<::std::complex<T>> { using type = T; };
template <typename T>
constexpr bool kIsComplex = !::std::is_same_v<typename RealOf<T>::type, T>;
// Whether A and B, at least one of them complex, have different real types. std:: has the operators
// for equal real types.
template <typename A, typename B>
constexpr bool kMixed = (kIsComplex<A> && (::std::is_arithmetic_v<B> || kIsComplex<B>) &&
                         !::std::is_same_v<typename RealOf<A>::type, typename RealOf<B>::type>) ||
                        (kIsComplex<B> && ::std::is_arithmetic_v<A> &&
                         !::std::is_same_v<A, typename RealOf<B>::type>);
// The type of the result: integers are converted to the real type of the complex operand.
template <typename A, typename B>
using Common = ::std::complex<::std::conditional_t<
    ::std::is_integral_v<A>, typename RealOf<B>::type,
    ::std::conditional_t<::std::is_integral_v<B>, typename RealOf<A>::type,
                         ::std::common_type_t<typename RealOf<A>::type, typename RealOf<B>::type>>>>;
template <typename C, typename X>
inline C complex_of(const X& x) {
  using R = typename C::value_type;
  if constexpr (kIsComplex<X>) {
    return C(static_cast<R>(x.real()), static_cast<R>(x.imag()));
  } else {
    return C(static_cast<R>(x));
  }
}

}  // namespace cukit::emulator

#define CUKIT_COMPLEX(op)                                                                       \
  template <typename A, typename B, ::std::enable_if_t<::cukit::emulator::kMixed<A, B>, int> = 0> \
  inline ::cukit::emulator::Common<A, B> operator op(const A& a, const B& b) {                    \
    using C = ::cukit::emulator::Common<A, B>;                                                  \
    return ::cukit::emulator::complex_of<C>(a) op ::cukit::emulator::complex_of<C>(b);            \
  }
CUKIT_COMPLEX(+)
CUKIT_COMPLEX(-)
CUKIT_COMPLEX(*)
CUKIT_COMPLEX(/)
#undef CUKIT_COMPLEX
