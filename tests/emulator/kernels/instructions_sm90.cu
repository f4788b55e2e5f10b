// Hopper's instructions on raw registers and raw shared memory. One warpgroup.
// Macros, by kernel:
//   stmatrix                   TRANS 0|1
//   tensor_load, tensor_store  BYTES of a box; BOX_X, BOX_Y: its position; ADD 0|1: the store adds
//   bulk_copy, multicast       PIECE: bytes of a copy
//   wgmma                      IMAGE: bytes of shared memory; COLUMNS 64|128|256; SWIZZLE 0: none,
//                              1: 128 bytes, 2: 64, 3: 32; TRANSPOSED_A, TRANSPOSED_B 0|1;
//                              REGISTERS 0|1: operand a is in registers; FLOAT8 0|1: operands are
//                              e4m3, with COLUMNS 64
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace {

constexpr int kThreads = 128;

// Copies `bytes` bytes to or from shared memory, 16 at a time.
CUKIT_DEVICE void copy(uint4* to, const uint4* from, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += kThreads) to[i] = from[i];
}

}  // namespace

#ifdef TRANS

extern "C" __global__ void stmatrix(const unsigned* registers,  // [4, 32]: register, lane
                                    uint4* rows) {              // [32], 16 bytes each
  __shared__ uint4 tile[32];
  const int lane = threadIdx.x;
  if (lane < 32) {
    unsigned r[4];
    for (int i = 0; i < 4; ++i) r[i] = registers[i * 32 + lane];
    if (TRANS) {
      cukit::stmatrix_x4_trans(cukit::shared_address(&tile[lane]), r);
    } else {
      cukit::stmatrix_x4(cukit::shared_address(&tile[lane]), r);
    }
    __syncwarp();
    rows[lane] = tile[lane];
  }
}

#endif

#ifdef BYTES

extern "C" __global__ void tensor_load(const __grid_constant__ cukit::TensorMap map,
                                       uint4* out) {  // BYTES, the contents of shared memory
  __shared__ cukit::Mbarrier barrier;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&barrier, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&barrier, BYTES);
    cukit::tma_load_2d(tile, &map, &barrier, BOX_X, BOX_Y);
  }
  cukit::mbarrier_wait(&barrier, 0);
  copy(out, reinterpret_cast<const uint4*>(tile), BYTES);
}

extern "C" __global__ void tensor_store(const uint4* image,  // BYTES
                                        const __grid_constant__ cukit::TensorMap map) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  copy(reinterpret_cast<uint4*>(tile), image, BYTES);
  cukit::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (ADD) {
      cukit::tma_add_2d(&map, tile, BOX_X, BOX_Y);
    } else {
      cukit::tma_store_2d(&map, tile, BOX_X, BOX_Y);
    }
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}

#endif

#ifdef PIECE

// Copies `from` to shared memory and from there to `to`, with bulk copies.
extern "C" __global__ void bulk_copy(const uint4* from, uint4* to) {  // PIECE bytes
  __shared__ cukit::Mbarrier barrier;
  CUKIT_DYNAMIC_SHARED(unsigned char, piece);
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&barrier, 1);
    cukit::fence_mbarrier_init();
    cukit::mbarrier_arrive_expect(&barrier, PIECE);
    cukit::bulk_load(piece, from, PIECE, &barrier);
    cukit::mbarrier_wait(&barrier, 0);
    cukit::bulk_store(to, piece, PIECE);
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}

// Two blocks: each multicasts one of two boxes of 16 x 64 elements to both. Every thread then arrives at
// the `empty` barriers of both blocks, as in a multicast pipeline.
extern "C" __global__ void __cluster_dims__(2, 1, 1) multicast(
    const __grid_constant__ cukit::TensorMap map, uint4* out) {  // [2, 2 * PIECE bytes]
  __shared__ cukit::Mbarrier full, empty;
  CUKIT_DYNAMIC_SHARED(unsigned char, boxes);
  const int rank = cukit::cluster_rank();
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::mbarrier_init(&empty, 2 * kThreads);
    cukit::fence_mbarrier_init();
    cukit::mbarrier_arrive_expect(&full, 2 * PIECE);
  }
  cukit::cluster_arrive();
  cukit::cluster_wait();
  if (threadIdx.x == 0) {
    cukit::tma_load_2d_multicast(boxes + rank * PIECE, &map, &full, 0, 16 * rank, 3);
  }
  cukit::mbarrier_wait(&full, 0);
  copy(out + rank * 2 * PIECE / 16, reinterpret_cast<const uint4*>(boxes), 2 * PIECE);
  for (int other = 0; other < 2; ++other) cukit::mbarrier_arrive_remote(&empty, other);
  cukit::mbarrier_wait(&empty, 0);
  cukit::cluster_arrive();
  cukit::cluster_wait();
}

#endif

#ifdef IMAGE

extern "C" __global__ void wgmma(const uint4* image,         // IMAGE bytes of shared memory
                                 const unsigned* registers,  // [128, 4] of operand a
                                 float* out,                 // [128, COLUMNS / 2]
                                 int a_offset, int b_offset, int a_leading, int a_stride,
                                 int b_leading, int b_stride) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  copy(reinterpret_cast<uint4*>(shared), image, IMAGE);
  cukit::fence_proxy_async();
  __syncthreads();
  float d[COLUMNS / 2];
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] = i % 5;
  constexpr auto kSwizzle = static_cast<cukit::OperandSwizzle>(SWIZZLE);
  const auto a = cukit::matrix_descriptor(shared + a_offset, kSwizzle, a_leading, a_stride);
  const auto b = cukit::matrix_descriptor(shared + b_offset, kSwizzle, b_leading, b_stride);
#if REGISTERS
  unsigned from_registers[4];
  for (int i = 0; i < 4; ++i) from_registers[i] = registers[4 * threadIdx.x + i];
#endif
  cukit::wgmma_fence();
#if FLOAT8
  cukit::wgmma_e4m3<64>(d, a, b, true);
#elif REGISTERS
  cukit::wgmma<__half, COLUMNS, TRANSPOSED_B>(d, from_registers, b, true);
#else
  cukit::wgmma<__half, COLUMNS, TRANSPOSED_A, TRANSPOSED_B>(d, a, b, true);
#endif
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(d);
  for (int i = 0; i < COLUMNS / 2; ++i) out[threadIdx.x * (COLUMNS / 2) + i] = d[i];
}

#endif
