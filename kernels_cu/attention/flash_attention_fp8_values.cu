// Prepares the values of FP8 attention as a wgmma operand, once for all tiles of queries that read
// them.
//
// Mapping: one block per TILE_N keys of a head: TMA loads their values, four warps transpose or
//   widen the values within shared memory, and one bulk copy stores the result.
// Output: [heads_kv, tiles][tile], a tile in the layout of float8_values.cuh: PRECISE 0: [TILE_N /
//   16][VALUE_DIM][16] bytes; 1: parts [TILE_N][64] of float16, rows swizzled. Keys beyond the end
//   of a sequence and columns outside the tensor are zeros.
// Tensor map: V as bytes [batch, seq_kv, heads_kv, value_dim], VARLEN [1, total_kv, ...], swizzled
//   boxes [1, TILE_N, 1, 64 or 128].
// Shared memory: the loaded tile | the prepared tile, dynamic. Static: a barrier.
// Macros: VALUE_DIM multiple of 16 up to 256; TILE_N multiple of 32; PRECISE 0|1; VARLEN 0|1;
//   THREADS 128.
// Architecture: sm_90. Deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/float8_values.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"

namespace {

#if PRECISE
using Values = cukit::HalfTile<TILE_N, VALUE_DIM>;
#else
using Values = cukit::SlabTile<TILE_N, VALUE_DIM>;
#endif
using Raw = Values::Raw;

// A tile of a sequence: its batch and first row in the map, and the number of keys from there to
// the sequence's end.
struct Tile {
  int batch, row, keys;
};

CUKIT_DEVICE Tile tile_at(int index, const int* ends, int batch, int seq_kv) {
#if VARLEN
  int b = 0;  // the last sequence that starts at this tile or an earlier one
  for (int end = batch; end - b > 1;) {
    const int middle = (b + end) / 2;
    (cukit::first_value_tile<TILE_N>(true, middle, ends[middle], 0) <= index ? b : end) = middle;
  }
  const int first = (index - cukit::first_value_tile<TILE_N>(true, b, ends[b], 0)) * TILE_N;
  return {0, ends[b] + first, ends[b + 1] - ends[b] - first};
#else
  const int tiles = (seq_kv + TILE_N - 1) / TILE_N;
  const int first = index % tiles * TILE_N;
  return {index / tiles, first, seq_kv - first};
#endif
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) flash_attention_fp8_values(
    const __grid_constant__ cukit::TensorMap v,  // [batch, seq_kv, heads_kv, value_dim]
    const int* __restrict__ cu_seqlens_kv,       // VARLEN: [batch + 1]
    unsigned char* __restrict__ values,          // [heads_kv, tiles][tile]
    int tiles, int batch, int seq_kv) {          // tiles of a head
  __shared__ cukit::Mbarrier full;
  CUKIT_DYNAMIC_SHARED(unsigned char, raw);
  unsigned char* const prepared = raw + Raw::kBytes;
  const Tile tile = tile_at(blockIdx.x % tiles, cu_seqlens_kv, batch, seq_kv);
  if (threadIdx.x == 0) {
    cukit::mbarrier_init(&full, 1);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();
  if (!VARLEN || tile.keys > 0) {
    if (threadIdx.x == 0) {
      cukit::mbarrier_arrive_expect(&full, Raw::kBytes);
      Raw::load(raw, &v, &full, blockIdx.x / tiles, tile.row, tile.batch);
    }
    cukit::mbarrier_wait(&full, 0);
    Values::prepare(raw, prepared, tile.keys, threadIdx.x / cukit::kWarpSize,
                    THREADS / cukit::kWarpSize);
  } else {
    // No sequence has keys in this tile. A sequence of length 0 reads it with probabilities of 0,
    // so it must not contain NaN.
    for (int byte = 16 * threadIdx.x; byte < Values::kBytes; byte += 16 * THREADS) {
      *reinterpret_cast<uint4*>(prepared + byte) = uint4{};
    }
  }
  cukit::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    cukit::bulk_store(values + static_cast<long long>(blockIdx.x) * Values::kBytes, prepared,
                      Values::kBytes);
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}
