// red.global.add: adds to global memory without returning the old value. The order of additions to
// one address is not fixed, so the last bits of the sum are not deterministic.
#pragma once

#include "common/platform.cuh"

#if __CUDA_ARCH__ >= 900

namespace cukit {

// red.global.add.v4.f32 (sm_90): `to` is 16-byte aligned. Each float is added atomically, the four
// together are not.
CUKIT_DEVICE void reduce_add_x4(float* to, const float (&add)[4]) {
#ifdef CUKIT_EMULATE
  emulator::check_alignment(to, 16, "red.global.add.v4.f32");
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, add[i]);
#else
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(add[0]),
               "f"(add[1]), "f"(add[2]), "f"(add[3])
               : "memory");
#endif
}

}  // namespace cukit

#endif
