// Counts how often each token was generated, and marks the tokens that occur in the history at all.
//
//   counts[request, v] = #{i >= prompt_length : history[request, i] == v}
//                      + (2^31 if v occurs in history[request])
//
// Mapping: grid (chunks of the vocabulary, requests); a block clears its chunk and then counts the
//   tokens of the history that are in its chunk. Ids outside the vocabulary, such as -1, are
//   ignored.
// Macros: THREADS. Minimum architecture: sm_80. Integers: deterministic.
// Reference: cukit/reference/sampling.py, count_tokens.
#include "common/platform.cuh"
#include "sampling/parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) count_tokens(
    const int* __restrict__ history,         // [requests, length]
    const int* __restrict__ prompt_lengths,  // [requests] or null: 0
    int* counts,                             // [requests, vocab_size]
    const __grid_constant__ cukit::CountParameters p) {
  const int request = static_cast<int>(blockIdx.y);
  const int begin = static_cast<int>(blockIdx.x) * p.chunk;
  const int end = min(begin + p.chunk, p.vocab_size);
  int* own = counts + static_cast<long long>(request) * p.vocab_size;
  for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += THREADS) own[v] = 0;
  __syncthreads();
  const int* text = history + static_cast<long long>(request) * p.length;
  const int prompt = prompt_lengths == nullptr ? 0 : prompt_lengths[request];
  for (int i = threadIdx.x; i < p.length; i += THREADS) {
    const int token = text[i];
    if (token < begin || token >= end) continue;
    atomicOr(&own[token], static_cast<int>(0x80000000u));
    if (i >= prompt) atomicAdd(&own[token], 1);
  }
}
