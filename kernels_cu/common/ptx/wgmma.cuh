// wgmma (sm_90a): asynchronous matrix products of a warpgroup, which is four warps.
//
// d += a b, where a is 64 x K, b is K x N, and K elements are 32 bytes. Operand b is in shared
// memory, a in shared memory or registers. A matrix descriptor defines the layout in shared memory:
//   K-major    eight rows (of a, or columns of b), each as long as the swizzle, are contiguous;
//              groups of eight are `stride` bytes apart.
//   MN-major   (transposed) eight steps of k, each as long as the swizzle, are contiguous; groups
//              of eight are `stride` bytes apart, further rows (columns) `leading` bytes apart.
// Without a swizzle the 8 x 16 byte core matrices are contiguous; `leading` is their distance along
// k and `stride` that along rows (columns), K-major or MN-major.
//
// Accumulators: warp w of the group has rows 16 w .. 16 w + 15; d[i] of lane l is row
// l / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (l % 4) + i % 2. Operand a in registers has the
// layout of operand A of mma.sync.
//
// Call wgmma_fence before the first product of a group, wgmma_commit after the last, and wgmma_wait
// before the accumulators are read or the operands overwritten.
#pragma once

#include "common/codes.cuh"
#include "common/platform.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit {

// The swizzle pattern of 16-byte chunks; the same as the tensor map's.
enum class OperandSwizzle : unsigned long long { None = 0, Bytes128 = 1, Bytes64 = 2, Bytes32 = 3 };

// A matrix descriptor. Swizzled tiles are aligned to eight times the swizzle; for K-major operands,
// steps along k advance `shared` within the first row.
CUKIT_DEVICE unsigned long long matrix_descriptor(const void* shared, OperandSwizzle swizzle,
                                                  unsigned leading_bytes, unsigned stride_bytes) {
  return static_cast<unsigned long long>((shared_address(shared) & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading_bytes >> 4) << 16 |
         static_cast<unsigned long long>(stride_bytes >> 4) << 32 |
         static_cast<unsigned long long>(swizzle) << 62;
}

// wgmma.fence: orders earlier accesses to the accumulators, and to operand a in registers, before
// the products that follow.
CUKIT_DEVICE void wgmma_fence() {
#ifdef CUKIT_EMULATE
  emulator::wgmma_fence();
#else
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}

// wgmma.commit_group
CUKIT_DEVICE void wgmma_commit() {
#ifdef CUKIT_EMULATE
  emulator::wgmma_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}

// wgmma.wait_group: waits until at most `Pending` groups, the latest, are in flight. Passing the
// accumulators `d` keeps the compiler from reading them before the wait.
template <int Pending, int N>
CUKIT_DEVICE void wgmma_wait(float (&d)[N]) {
#ifdef CUKIT_EMULATE
  emulator::wgmma_wait(Pending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

template <int Pending, int N>
CUKIT_DEVICE void wgmma_wait(int (&d)[N]) {
#ifdef CUKIT_EMULATE
  emulator::wgmma_wait(Pending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
#endif
}

// The same for waits after which operands are overwritten but no accumulators are read.
template <int Pending>
CUKIT_DEVICE void wgmma_wait() {
#ifdef CUKIT_EMULATE
  emulator::wgmma_wait(Pending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
#endif
}

namespace detail {

template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<__half> = true;
template <typename T>
constexpr bool kIsInteger = false;
template <>
constexpr bool kIsInteger<Int8> = true;

#ifdef CUKIT_EMULATE
template <typename T>
constexpr emulator::Number kNumber = kIsHalf<T> ? emulator::Number::F16 : emulator::Number::BF16;
#endif

}  // namespace detail

#ifndef CUKIT_EMULATE

// Accumulators as operand numbers, eight more per line, and as operands of the asm statement with
// the constraint `c`: "+f" or "+r".
#define CUKIT_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUKIT_D16 CUKIT_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUKIT_D24 CUKIT_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUKIT_D32 CUKIT_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUKIT_D40 CUKIT_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUKIT_D48 CUKIT_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUKIT_D56 CUKIT_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUKIT_D64 CUKIT_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUKIT_D72 CUKIT_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUKIT_D80 CUKIT_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUKIT_D88 CUKIT_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUKIT_D96 CUKIT_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUKIT_D104 CUKIT_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CUKIT_D112 CUKIT_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CUKIT_D120 CUKIT_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUKIT_D128 CUKIT_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CUKIT_OUT(c, i)                                                                 \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), \
      c(d[i + 7])
#define CUKIT_OUT8(c) CUKIT_OUT(c, 0)
#define CUKIT_OUT16(c) CUKIT_OUT8(c), CUKIT_OUT(c, 8)
#define CUKIT_OUT24(c) CUKIT_OUT16(c), CUKIT_OUT(c, 16)
#define CUKIT_OUT32(c) CUKIT_OUT24(c), CUKIT_OUT(c, 24)
#define CUKIT_OUT40(c) CUKIT_OUT32(c), CUKIT_OUT(c, 32)
#define CUKIT_OUT48(c) CUKIT_OUT40(c), CUKIT_OUT(c, 40)
#define CUKIT_OUT56(c) CUKIT_OUT48(c), CUKIT_OUT(c, 48)
#define CUKIT_OUT64(c) CUKIT_OUT56(c), CUKIT_OUT(c, 56)
#define CUKIT_OUT72(c) CUKIT_OUT64(c), CUKIT_OUT(c, 64)
#define CUKIT_OUT80(c) CUKIT_OUT72(c), CUKIT_OUT(c, 72)
#define CUKIT_OUT88(c) CUKIT_OUT80(c), CUKIT_OUT(c, 80)
#define CUKIT_OUT96(c) CUKIT_OUT88(c), CUKIT_OUT(c, 88)
#define CUKIT_OUT104(c) CUKIT_OUT96(c), CUKIT_OUT(c, 96)
#define CUKIT_OUT112(c) CUKIT_OUT104(c), CUKIT_OUT(c, 104)
#define CUKIT_OUT120(c) CUKIT_OUT112(c), CUKIT_OUT(c, 112)
#define CUKIT_OUT128(c) CUKIT_OUT120(c), CUKIT_OUT(c, 120)

// For each number of columns: row(types, columns, accumulator registers, numbers of the seven asm
// operands that follow the accumulators).
#define CUKIT_WGMMA_COLUMNS(row, types) \
  row(types, 16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14") \
  row(types, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22") \
  row(types, 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30") \
  row(types, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38") \
  row(types, 80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46") \
  row(types, 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54") \
  row(types, 112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62") \
  row(types, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70") \
  row(types, 144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78") \
  row(types, 160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86") \
  row(types, 176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94") \
  row(types, 192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102") \
  row(types, 208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110") \
  row(types, 224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118") \
  row(types, 240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126") \
  row(types, 256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// The instruction `name` with the operand numbers of accumulators, a, b, accumulate flag and
// immediates (signs, then transpositions for 16-bit operands; integers have none).
#define CUKIT_WGMMA(name, registers, a_operand, b_operand, flag, immediates, out, ...)          \
  asm volatile(                                                                                 \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " flag ", 0;\n"                       \
      "wgmma.mma_async.sync.aligned." name " {" registers "}, " a_operand ", " b_operand        \
      ", accumulate" immediates ";\n}\n"                                                        \
      : out                                                                                     \
      : __VA_ARGS__)

// 16-bit operands: both from shared memory, or a from registers.
#define CUKIT_WGMMA_SHARED(types, columns, count, p0, p1, p2, p3, p4, p5, p6) \
  if constexpr (N == columns) {                                                                    \
    CUKIT_WGMMA("m64n" #columns "k16" types, CUKIT_D##count, p0, p1, p2, ", 1, 1, " p3 ", " p4,    \
                CUKIT_OUT##count("+f"), "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(TransposedA)),     \
                "n"(int(TransposedB)));                                                            \
  }
#define CUKIT_WGMMA_REGISTERS(types, columns, count, p0, p1, p2, p3, p4, p5, p6) \
  if constexpr (N == columns) {                                                                    \
    CUKIT_WGMMA("m64n" #columns "k16" types, CUKIT_D##count,                                       \
                "{" p0 ", " p1 ", " p2 ", " p3 "}", p4, p5, ", 1, 1, " p6, CUKIT_OUT##count("+f"), \
                "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),          \
                "n"(int(TransposedB)));                                                            \
  }
// FP8 operands, which are always K-major.
#define CUKIT_WGMMA_SHARED_BYTES(types, columns, count, p0, p1, p2, p3, p4, p5, p6) \
  if constexpr (N == columns) {                                                                    \
    CUKIT_WGMMA("m64n" #columns "k32" types, CUKIT_D##count, p0, p1, p2, ", 1, 1",                 \
                CUKIT_OUT##count("+f"), "l"(a), "l"(b), "r"(int(accumulate)));                     \
  }
#define CUKIT_WGMMA_REGISTER_BYTES(types, columns, count, p0, p1, p2, p3, p4, p5, p6) \
  if constexpr (N == columns) {                                                                    \
    CUKIT_WGMMA("m64n" #columns "k32" types, CUKIT_D##count,                                       \
                "{" p0 ", " p1 ", " p2 ", " p3 "}", p4, p5, ", 1, 1", CUKIT_OUT##count("+f"),      \
                "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));         \
  }
// 8-bit integers, from shared memory: without sign immediates.
#define CUKIT_WGMMA_SHARED_INTEGERS(types, columns, count, p0, p1, p2, p3, p4, p5, p6) \
  if constexpr (N == columns) {                                                                    \
    CUKIT_WGMMA("m64n" #columns "k32" types, CUKIT_D##count, p0, p1, p2, "",                       \
                CUKIT_OUT##count("+r"), "l"(a), "l"(b), "r"(int(accumulate)));                     \
  }

#endif

template <int N>
constexpr bool kValidColumns = N % 16 == 0 && N >= 16 && N <= 256;

// wgmma.mma_async m64n<N>k32, FP8 (e4m3) operands, K-major.
template <int N>
CUKIT_DEVICE void wgmma_e4m3(float (&d)[N / 2], unsigned long long a, unsigned long long b,
                             bool accumulate) {
  static_assert(kValidColumns<N>, "N is a multiple of 16, 16 to 256");
#ifdef CUKIT_EMULATE
  emulator::wgmma({emulator::Number::E4M3, emulator::Number::E4M3, N, d, nullptr, a, b, false,
                   false, accumulate});
#else
  CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_SHARED_BYTES, ".f32.e4m3.e4m3")
#endif
}

// wgmma.mma_async m64n<N>k32, signed 8-bit integers, K-major: exact, accumulators wrap.
template <int N>
CUKIT_DEVICE void wgmma_s8(int (&d)[N / 2], unsigned long long a, unsigned long long b,
                           bool accumulate) {
  static_assert(kValidColumns<N>, "N is a multiple of 16, 16 to 256");
#ifdef CUKIT_EMULATE
  emulator::wgmma({emulator::Number::S8, emulator::Number::S8, N, d, nullptr, a, b, false, false,
                   accumulate});
#else
  CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_SHARED_INTEGERS, ".s32.s8.s8")
#endif
}

// d = a b, or d += a b if `accumulate`. 16-bit operands (wgmma.mma_async m64n<N>k16) are MN-major
// with TransposedA or TransposedB; 8-bit operands as above. a and b are matrix descriptors.
template <typename T, int N, bool TransposedA = false, bool TransposedB = false>
CUKIT_DEVICE void wgmma(typename AccumulatorOf<T>::Type (&d)[N / 2], unsigned long long a,
                        unsigned long long b, bool accumulate) {
  static_assert(kValidColumns<N>, "N is a multiple of 16, 16 to 256");
  static_assert(sizeof(T) == 2 || !(TransposedA || TransposedB), "8-bit operands are K-major");
  if constexpr (detail::kIsInteger<T>) {
    wgmma_s8<N>(d, a, b, accumulate);
  } else if constexpr (sizeof(T) == 1) {
    wgmma_e4m3<N>(d, a, b, accumulate);
  } else {
#ifdef CUKIT_EMULATE
    emulator::wgmma({detail::kNumber<T>, detail::kNumber<T>, N, d, nullptr, a, b, TransposedA,
                     TransposedB, accumulate});
#else
    if constexpr (detail::kIsHalf<T>) {
      CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_SHARED, ".f32.f16.f16")
    } else {
      CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_SHARED, ".f32.bf16.bf16")
    }
#endif
  }
}

// The same with operand a from registers, four per thread.
template <typename T, int N, bool TransposedB = false>
CUKIT_DEVICE void wgmma(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,
                        bool accumulate) {
  static_assert(kValidColumns<N>, "N is a multiple of 16, 16 to 256");
#ifdef CUKIT_EMULATE
  emulator::wgmma({detail::kNumber<T>, detail::kNumber<T>, N, d, a, 0, b, false, TransposedB,
                   accumulate});
#else
  if constexpr (detail::kIsHalf<T>) {
    CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_REGISTERS, ".f32.f16.f16")
  } else {
    CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_REGISTERS, ".f32.bf16.bf16")
  }
#endif
}

// wgmma_e4m3 with operand a from registers, four per thread.
template <int N>
CUKIT_DEVICE void wgmma_e4m3(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,
                             bool accumulate) {
  static_assert(kValidColumns<N>, "N is a multiple of 16, 16 to 256");
#ifdef CUKIT_EMULATE
  emulator::wgmma({emulator::Number::E4M3, emulator::Number::E4M3, N, d, a, 0, b, false, false,
                   accumulate});
#else
  CUKIT_WGMMA_COLUMNS(CUKIT_WGMMA_REGISTER_BYTES, ".f32.e4m3.e4m3")
#endif
}

}  // namespace cukit
