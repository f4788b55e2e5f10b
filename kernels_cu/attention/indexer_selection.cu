// Bit masks of the keys selected for each query of a chunk.
//
// `indices` holds indices of keys in the query's sequence. Negative ones, which pad the lists, and
// those beyond the sequence's length are ignored. A block writes the bits of one query.
// Macros: DTYPE of the heads; TILE_M; THREADS; VARLEN 0|1.
// Minimum architecture: sm_80. Deterministic: the result of atomicOr does not depend on the order.
// Reference: cukit/reference/indexer_kl.py.
#include "attention/indexer_work.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) indexer_selection(
    const int* __restrict__ indices,        // [batch, seq_q, top_k]; VARLEN: [total_q, top_k]
    unsigned* __restrict__ selected,        // [chunk rows, scratch_row / 32]
    const int* __restrict__ cu_seqlens_q,   // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,  // [batch + 1]
    const __grid_constant__ cukit::IndexerParameters params, int first_tile) {
  const int row = static_cast<int>(blockIdx.x) % TILE_M;
  const cukit::IndexerWork work(static_cast<int>(blockIdx.x) / TILE_M, first_tile, params,
                                cu_seqlens_q, cu_seqlens_kv);
  if (work.rows_left <= 0) return;
  const int words = params.scratch_row / 32;
  unsigned* bits = selected + (work.scratch + row) * words;
  for (int word = threadIdx.x; word < words; word += THREADS) bits[word] = 0;
  __syncthreads();
  if (row >= work.rows_left) return;
  const long long query = (VARLEN ? 0 : static_cast<long long>(work.b) * params.seq_q) +
                          work.sequence.first_q + work.first_row + row;
  const int* own = indices + query * params.top_k;
  for (int i = threadIdx.x; i < params.top_k; i += THREADS) {
    const int key = own[i];
    if (key >= 0 && key < work.sequence.seq_kv) atomicOr(&bits[key / 32], 1u << (key % 32));
  }
}
