// The schedule of variable-length sequences: longest first, so that the blocks of the attention
// kernel finish at about the same time.
//
// Mapping: one block. It sorts the sequences by length into buckets, the most keys first, and
//   computes the prefix sums of their tiles of queries over all heads. The order within a bucket is
//   not deterministic: it determines which block computes a tile, but not the result.
// Shared memory: static, one counter per bucket.
// Macros: TILE_M queries of a tile; THREADS, also the number of buckets; PAGED 0|1 keys are in the
//   blocks of a cache.
// Deterministic: plan[num_seqs + 1] (the number of work items) and the results of the attention
//   kernel. Not deterministic: the order of the sequences.
// Reference: tests/attention/test_flash_schedule.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"

#ifndef PAGED
#define PAGED 0
#endif

namespace {

constexpr int kWarps = THREADS / cukit::kWarpSize;

// Returns the sum of `value` over the threads before this one; `total` becomes the sum over all
// threads. Ends with a barrier.
CUKIT_DEVICE int sum_before(int value, int& total) {
  __shared__ int warps[kWarps];
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  int before = cukit::warp_sum_before(value);
  if (lane == cukit::kWarpSize - 1) warps[warp] = before + value;
  __syncthreads();
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  __syncthreads();
  return before;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) plan_sequences(
    const int* __restrict__ cu_seqlens_q,   // [num_seqs + 1]; PAGED: or null
    const int* __restrict__ cu_seqlens_kv,  // [num_seqs + 1]; PAGED: [num_seqs], lengths
    int* __restrict__ plan,  // [2 * num_seqs + 2]: next work | starts | order (query_work.cuh)
    int num_seqs, int heads_q, int max_seqlen_kv,
#if PAGED
    int seq_q,  // of every sequence where cu_seqlens_q is null
    int min_queries,  // sequences with fewer queries are skipped
#endif
    int blocks) {  // of the attention kernel's grid; block i starts with work item i
  __shared__ int buckets[THREADS];
  int* const starts = plan + 1;
  int* const order = plan + 2 + num_seqs;
  const auto bucket_of = [&](int sequence) {
#if PAGED
    const int keys = min(cu_seqlens_kv[sequence], max_seqlen_kv);
#else
    const int keys = cu_seqlens_kv[sequence + 1] - cu_seqlens_kv[sequence];
#endif
    const long long most = max(1, max_seqlen_kv);
    return THREADS - 1 - static_cast<int>(min(most, 0ll + keys) * (THREADS - 1) / most);
  };

  buckets[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_seqs; i += THREADS) atomicAdd(&buckets[bucket_of(i)], 1);
  __syncthreads();
  int all;
  buckets[threadIdx.x] = sum_before(buckets[threadIdx.x], all);
  __syncthreads();
  for (int i = threadIdx.x; i < num_seqs; i += THREADS) {
    order[atomicAdd(&buckets[bucket_of(i)], 1)] = i;
  }
  __syncthreads();

  int works = 0;
  for (int first = 0; first < num_seqs; first += THREADS) {
    const int i = first + static_cast<int>(threadIdx.x);
    int own = 0;
    if (i < num_seqs) {
#if PAGED
      const int queries = cu_seqlens_q == nullptr
                              ? seq_q
                              : cu_seqlens_q[order[i] + 1] - cu_seqlens_q[order[i]];
      const bool included = queries >= min_queries;
#else
      const int queries = cu_seqlens_q[order[i] + 1] - cu_seqlens_q[order[i]];
      constexpr bool included = true;
#endif
      if (included) own = heads_q * ((queries + TILE_M - 1) / TILE_M);
    }
    int total;
    const int before = sum_before(own, total);
    if (i < num_seqs) starts[i] = works + before;
    works += total;
  }
  if (threadIdx.x == 0) {
    starts[num_seqs] = works;
    plan[0] = blocks;
  }
}
