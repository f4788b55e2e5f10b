// mma.sync of the shapes and types that mma.cuh lacks: 16-bit floats with k = 8, tf32, and 8-bit
// integers and floats (sm_80).
//
// With g = lane / 4 and t = lane % 4, each register of A and B holds E = 4 / (bytes of an element)
// elements, neighbours along k:
//   A (16 x k)   a0: row g, k = E t ..   a1: row g + 8   a2: k = E (t + 4) ..   a3: both
//   B (k x 8)    b0: column g, k = E t ..   b1: k = E (t + 4) ..
//   D (16 x 8)   d0 d1: row g, columns 2t 2t+1   d2 d3: row g + 8
#pragma once

#include "common/platform.cuh"

namespace cukit {

// mma.sync.aligned.m16n8k8, float16: d += a * b. A has only a0 and a1, B only b0.
CUKIT_DEVICE void mma_16x8x8_f16(float (&d)[4], const unsigned (&a)[2], unsigned b) {
#ifdef CUKIT_EMULATE
  emulator::mma(emulator::Number::F16, emulator::Number::F16, 8, d, a, &b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
}

// mma.sync.aligned.m16n8k8, bfloat16: d += a * b. A has only a0 and a1, B only b0.
CUKIT_DEVICE void mma_16x8x8_bf16(float (&d)[4], const unsigned (&a)[2], unsigned b) {
#ifdef CUKIT_EMULATE
  emulator::mma(emulator::Number::BF16, emulator::Number::BF16, 8, d, a, &b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
}

// mma.sync.aligned.m16n8k8, tf32: d += a * b, from the upper 19 bits of floats
CUKIT_DEVICE void mma_16x8x8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUKIT_EMULATE
  emulator::mma(emulator::Number::TF32, emulator::Number::TF32, 8, d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// mma.sync.aligned.m16n8k32, signed 8-bit integers: d += a * b, wrapping
CUKIT_DEVICE void mma_16x8x32_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUKIT_EMULATE
  emulator::mma(emulator::Number::S8, emulator::Number::S8, 32, d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#if __CUDA_ARCH__ >= 890

// mma.sync.aligned.m16n8k32, float8 e4m3 (sm_89): d += a * b
CUKIT_DEVICE void mma_16x8x32_e4m3(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUKIT_EMULATE
  emulator::mma(emulator::Number::E4M3, emulator::Number::E4M3, 32, d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// mma.sync.aligned.m16n8k32, float8 e5m2 (sm_89): d += a * b
CUKIT_DEVICE void mma_16x8x32_e5m2(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUKIT_EMULATE
  emulator::mma(emulator::Number::E5M2, emulator::Number::E5M2, 32, d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#endif

}  // namespace cukit
