// One instruction per kernel, on raw registers and raw shared memory, to compare the emulator with the
// GPU. One warp.
// Macros: TRANS 0|1 (ldmatrix); KIND 0 f16 k16 | 1 bf16 k16 | 2 f16 k8 | 3 bf16 k8 | 4 tf32 k8 |
//   5 s8 k32 | 6 e4m3 k32 | 7 e5m2 k32 (mma).
#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/mma_narrow.cuh"
#include "common/ptx/shared_address.cuh"

#ifdef TRANS

extern "C" __global__ void ldmatrix(const uint4* rows,  // [32], 16 bytes each
                                    unsigned* out) {    // [4, 32]: register, lane
  __shared__ uint4 tile[32];
  const int lane = threadIdx.x;
  tile[lane] = rows[lane];
  __syncwarp();
  unsigned r[4];
  if (TRANS) {
    cukit::ldmatrix_x4_trans(r, cukit::shared_address(&tile[lane]));
  } else {
    cukit::ldmatrix_x4(r, cukit::shared_address(&tile[lane]));
  }
  for (int i = 0; i < 4; ++i) out[i * 32 + lane] = r[i];
}

#endif

#ifdef KIND

#if KIND == 5
using Sum = int;
#else
using Sum = float;
#endif

extern "C" __global__ void mma(const unsigned* a_registers,  // [32, 4]
                               const unsigned* b_registers,  // [32, 2]
                               const Sum* c,                 // [32, 4]
                               Sum* out) {                   // [32, 4]
  const int lane = threadIdx.x;
  unsigned a[4], b[2];
  Sum d[4];
  for (int i = 0; i < 4; ++i) a[i] = a_registers[4 * lane + i];
  for (int i = 0; i < 2; ++i) b[i] = b_registers[2 * lane + i];
  for (int i = 0; i < 4; ++i) d[i] = c[4 * lane + i];
#if KIND == 0
  cukit::mma_16x8x16<__half>(d, a, b[0], b[1]);
#elif KIND == 1
  cukit::mma_16x8x16<__nv_bfloat16>(d, a, b[0], b[1]);
#elif KIND == 2 || KIND == 3
  const unsigned half_a[2] = {a[0], a[1]};
#if KIND == 2
  cukit::mma_16x8x8_f16(d, half_a, b[0]);
#else
  cukit::mma_16x8x8_bf16(d, half_a, b[0]);
#endif
#elif KIND == 4
  cukit::mma_16x8x8_tf32(d, a, b);
#elif KIND == 5
  cukit::mma_16x8x32_s8(d, a, b);
#elif KIND == 6
  cukit::mma_16x8x32_e4m3(d, a, b);
#else
  cukit::mma_16x8x32_e5m2(d, a, b);
#endif
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = d[i];
}

#endif
