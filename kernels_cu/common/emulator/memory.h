// Loads and stores with cache hints, fences, clocks and atomics.
#pragma once

#include <chrono>

#include "common/emulator/arithmetic.h"
#include "common/emulator/thread.h"

namespace cukit::emulator {

// T without deduction: `atomicAdd(&float, 1)` adds a float.
template <typename T>
struct Identity { using type = T; };
template <typename T>
using Same = typename Identity<T>::type;

}  // namespace cukit::emulator

// Cache hints are ignored.
#define CUKIT_CACHED_LOAD(name) \
  template <typename T>         \
  inline T name(const T* from) { return *from; }
CUKIT_CACHED_LOAD(__ldg)
CUKIT_CACHED_LOAD(__ldca)
CUKIT_CACHED_LOAD(__ldcg)
CUKIT_CACHED_LOAD(__ldcs)
CUKIT_CACHED_LOAD(__ldcv)
CUKIT_CACHED_LOAD(__ldlu)
#undef CUKIT_CACHED_LOAD

#define CUKIT_CACHED_STORE(name) \
  template <typename T>          \
  inline void name(T* to, const ::cukit::emulator::Same<T>& value) { *to = value; }
CUKIT_CACHED_STORE(__stcg)
CUKIT_CACHED_STORE(__stcs)
CUKIT_CACHED_STORE(__stwb)
CUKIT_CACHED_STORE(__stwt)
#undef CUKIT_CACHED_STORE

inline void __threadfence() { ::cukit::emulator::fence(::cukit::emulator::FenceScope::Device); }
inline void __threadfence_block() { ::cukit::emulator::fence(::cukit::emulator::FenceScope::Block); }
inline void __threadfence_system() { __threadfence(); }

inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
inline void __nanosleep(unsigned) { ::cukit::emulator::yield(); }
inline void __trap() { ::cukit::emulator::trap("__trap"); }

inline std::size_t __cvta_generic_to_shared(const void* pointer) {
  return ::cukit::emulator::shared_address(pointer);
}
inline std::size_t __cvta_generic_to_global(const void* pointer) {
  return reinterpret_cast<std::size_t>(pointer);
}

namespace cukit::emulator {

// The integer type with the size of a value.
template <std::size_t Bytes>
struct Bits;
template <>
struct Bits<1> { using type = std::uint8_t; };
template <>
struct Bits<2> { using type = std::uint16_t; };
template <>
struct Bits<4> { using type = std::uint32_t; };
template <>
struct Bits<8> { using type = std::uint64_t; };

// Returns the old value.
std::uint64_t atomic_compare_exchange(void* to, std::uint64_t expected, std::uint64_t value,
                                      std::size_t bytes);
std::uint64_t atomic_load(const void* from, std::size_t bytes);
// The checks of check_access for a compare-and-swap. An earlier plain read of the value by the same
// thread is not a race, because the comparison verifies the value that was read.
void check_compare(const void* pointer, std::size_t bytes, Access access);

// *to = update(*to), atomically; returns the old value.
template <typename T, typename Update>
inline T atomic_update(T* to, Update update, Access access = Access::Atomic) {
  using B = typename Bits<sizeof(T)>::type;
  check_access(to, sizeof(T), access);
  for (;;) {
    const B old = static_cast<B>(atomic_load(to, sizeof(T)));
    const B next = bit_cast<B>(static_cast<T>(update(bit_cast<T>(old))));
    if (static_cast<B>(atomic_compare_exchange(to, old, next, sizeof(T))) == old) {
      return bit_cast<T>(old);
    }
  }
}

}  // namespace cukit::emulator

#define CUKIT_ATOMIC(name, expression)                                              \
  template <typename T>                                                             \
  inline T name(T* to, ::cukit::emulator::Same<T> value) {                             \
    return ::cukit::emulator::atomic_update(to, [&](T old) { return expression; }); \
  }                                                                                 \
  template <typename T>                                                             \
  inline T name##_block(T* to, ::cukit::emulator::Same<T> value) {                     \
    return ::cukit::emulator::atomic_update(to, [&](T old) { return expression; },  \
                                            ::cukit::emulator::Access::BlockAtomic); \
  }                                                                                 \
  template <typename T>                                                             \
  inline T name##_system(T* to, ::cukit::emulator::Same<T> value) {                    \
    return name(to, value);                                                         \
  }
CUKIT_ATOMIC(atomicAdd, old + value)
CUKIT_ATOMIC(atomicSub, old - value)
CUKIT_ATOMIC(atomicMin, old < value ? old : value)
CUKIT_ATOMIC(atomicMax, old > value ? old : value)
CUKIT_ATOMIC(atomicAnd, old& value)
CUKIT_ATOMIC(atomicOr, old | value)
CUKIT_ATOMIC(atomicXor, old ^ value)
CUKIT_ATOMIC(atomicExch, (static_cast<void>(old), value))
CUKIT_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
CUKIT_ATOMIC(atomicDec, old == 0 || old > value ? value : T(old - 1))
#undef CUKIT_ATOMIC

#define CUKIT_COMPARE_AND_SWAP(name, access)                                                                \
  template <typename T>                                                                                     \
  inline T name(T* to, ::cukit::emulator::Same<T> expected, ::cukit::emulator::Same<T> value) {             \
    using B = typename ::cukit::emulator::Bits<sizeof(T)>::type;                                            \
    ::cukit::emulator::check_compare(to, sizeof(T), ::cukit::emulator::Access::access);                     \
    return ::cukit::emulator::bit_cast<T>(static_cast<B>(::cukit::emulator::atomic_compare_exchange(        \
        to, ::cukit::emulator::bit_cast<B>(expected), ::cukit::emulator::bit_cast<B>(value), sizeof(T))));  \
  }
CUKIT_COMPARE_AND_SWAP(atomicCAS, Atomic)
CUKIT_COMPARE_AND_SWAP(atomicCAS_system, Atomic)
CUKIT_COMPARE_AND_SWAP(atomicCAS_block, BlockAtomic)
#undef CUKIT_COMPARE_AND_SWAP
