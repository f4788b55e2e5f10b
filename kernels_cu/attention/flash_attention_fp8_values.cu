// Values of float8 attention, transposed once for all tiles of queries that read them.
//
// Mapping: a block takes TILE_N keys of one head: the copy engine brings them, four warps transpose
//   them from shared memory to shared memory, the copy engine takes them away in one run of bytes.
// Output: [batch, heads_kv, tiles][TILE_N / 16][HEAD_DIM][16] bytes (fp8_values.cuh); keys and
//   columns beyond the tensor are zeros.
// Tensor map: V as bytes [batch, seq_kv, heads_kv, head_dim], swizzled boxes
//   [1, TILE_N, 1, min(HEAD_DIM, 128)].
// Shared memory: 2 * TILE_N * HEAD_DIM bytes, dynamic. Static: a barrier.
// Macros: HEAD_DIM 64|128|256; TILE_N multiple of 32; THREADS 128.
// Architecture: sm_90. Deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/fp8_values.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

namespace {

using Values = cukit::Fp8Values<TILE_N, HEAD_DIM>;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_fp8_values(
    const __grid_constant__ cukit::TensorMap v,  // [batch, seq_kv, heads_kv, head_dim]
    unsigned char* __restrict__ transposed,      // gridDim: tiles, heads_kv, batch
    int tiles, int heads_kv) {
  __shared__ cukit::Mbarrier full;
  CUKIT_DYNAMIC_SHARED(unsigned char, rows);
  unsigned char* const slabs = rows + Values::kBytes;
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  const int tile = blockIdx.x;
  const int head = blockIdx.y;
  const int b = blockIdx.z;
  if (threadIdx.x == 0) {
    cukit::mbarrier_arrive_expect(&full, Values::kBytes);
    for (int part = 0; part < Values::kParts; ++part) {
      cukit::tma_load_4d(rows + part * Values::kPartBytes, &v, &full, part * Values::kRowBytes,
                         head, tile * TILE_N, b);
    }
  }
  cukit::mbarrier_wait(&full, 0);
  Values::transpose(rows, slabs, threadIdx.x / cukit::kWarpSize, THREADS / cukit::kWarpSize);
  cukit::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    const long long index = (static_cast<long long>(b) * heads_kv + head) * tiles + tile;
    cukit::bulk_store(transposed + index * Values::kBytes, slabs, Values::kBytes);
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}
