// Sums over runs of equal keys; runs are split at the ends of chunks of SPAN tokens.
//
// A run within one chunk needs no partial sum. For a split run every chunk stores a partial sum in
// parts[chunks, 2, hidden]: in row 1 if the run starts in the chunk, in row 0 if the run continues
// from the previous chunk.
//
// Macros of the kernels that include this file:
//   DTYPE, OUT float32|float16|bfloat16: elements of the gradients and of the result;
//   THREADS; VEC elements of a row per thread; SPAN tokens per chunk.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kPartsPerChunk = 2;
constexpr int kPartContinued = 0;
constexpr int kPartStarted = 1;

// Offset in floats of a partial sum in parts[chunks, 2, hidden].
CUKIT_DEVICE long long part_offset(int chunk, int part, int hidden) {
  return (static_cast<long long>(chunk) * kPartsPerChunk + part) * hidden;
}

// Rounds and stores N neighbouring elements, 16 bytes at a time where N allows.
template <typename Out, int N>
CUKIT_DEVICE void store_floats(Out* to, const float (&values)[N]) {
  constexpr int kMaxChunk = 16 / sizeof(Out);
  constexpr int kChunk = N < kMaxChunk ? N : kMaxChunk;
#pragma unroll
  for (int j = 0; j < N; j += kChunk) {
    Vec<Out, kChunk> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk[i] = from_float<Out>(values[j + i]);
    store(to + j, chunk);
  }
}

}  // namespace cukit
