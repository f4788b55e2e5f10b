// Values of float8 attention, made into an operand once for all tiles of queries that read them.
//
// Mapping: a block takes TILE_N keys of one head: the copy engine brings them, four warps transpose
//   or widen them from shared memory to shared memory, the copy engine takes them away in one run.
// Output: [batch, heads_kv, tiles][tile], a tile as fp8_values.cuh has it: HALVES 0: [TILE_N / 16]
//   [HEAD_DIM][16] bytes; 1: [HEAD_DIM / 64][TILE_N][64] float16, rows swizzled. Keys and columns
//   beyond the tensor are zeros.
// Tensor map: V as bytes [batch, seq_kv, heads_kv, head_dim], swizzled boxes
//   [1, TILE_N, 1, min(HEAD_DIM, 128)].
// Shared memory: (HALVES ? 3 : 2) * TILE_N * HEAD_DIM bytes, dynamic. Static: a barrier.
// Macros: HEAD_DIM 64|128|256; TILE_N multiple of 32, HALVES of 16; HALVES 0|1; THREADS 128.
// Architecture: sm_90. Deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/fp8_values.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

namespace {

#if HALVES
using Values = cukit::HalfValues<TILE_N, HEAD_DIM>;
#else
using Values = cukit::Fp8Values<TILE_N, HEAD_DIM>;
#endif
constexpr int kRowsBytes = Values::kParts * Values::kPartBytes;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_fp8_values(
    const __grid_constant__ cukit::TensorMap v,  // [batch, seq_kv, heads_kv, head_dim]
    unsigned char* __restrict__ values,          // gridDim: tiles, heads_kv, batch
    int tiles, int heads_kv) {
  __shared__ cukit::Mbarrier full;
  CUKIT_DYNAMIC_SHARED(unsigned char, rows);
  unsigned char* const prepared = rows + kRowsBytes;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  const int tile = blockIdx.x;
  const int head = blockIdx.y;
  const int b = blockIdx.z;
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, kRowsBytes);
    for (int part = 0; part < Values::kParts; ++part) {
      cukit::tma_load_4d(rows + part * Values::kPartBytes, &v, &full, part * Values::kRowBytes,
                         head, tile * TILE_N, b);
    }
  }
  cukit::mbarrier_wait(&full, 0);
  Values::prepare(rows, prepared, threadIdx.x / cukit::kWarpSize, THREADS / cukit::kWarpSize);
  cukit::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    const long long index = (static_cast<long long>(b) * heads_kv + head) * tiles + tile;
    cukit::bulk_store(values + index * Values::kBytes, prepared, Values::kBytes);
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}
