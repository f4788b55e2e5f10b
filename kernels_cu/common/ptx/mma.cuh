// mma.sync: a warp's 16x8x16 product on the tensor cores, float accumulation (sm_80).
//
// With g = lane / 4 and t = lane % 4, two neighbouring 16-bit elements per register:
//   A (16x16, row)    a0: row g, columns 2t 2t+1   a1: row g + 8   a2: columns + 8   a3: both
//   B (16x8, column)  b0: rows 2t 2t+1, column g   b1: rows + 8
//   C, D (16x8)       d0 d1: row g, columns 2t 2t+1   d2 d3: row g + 8
// So the D of two neighbouring column tiles, packed to 16 bits, is an A operand.
#pragma once

#include "common/platform.cuh"

namespace cukit {

template <typename T>
CUKIT_DEVICE void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

// mma.sync.aligned.m16n8k16, float16: d += a * b
template <>
CUKIT_DEVICE void mma_16x8x16<__half>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                      unsigned b1) {
#ifdef CUKIT_EMULATE
  const unsigned b[2] = {b0, b1};
  emulator::mma(emulator::Number::F16, emulator::Number::F16, 16, d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// mma.sync.aligned.m16n8k16, bfloat16: d += a * b
template <>
CUKIT_DEVICE void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
#ifdef CUKIT_EMULATE
  const unsigned b[2] = {b0, b1};
  emulator::mma(emulator::Number::BF16, emulator::Number::BF16, 16, d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace cukit
