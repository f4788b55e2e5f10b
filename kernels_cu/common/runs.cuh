// Sums over runs of equal keys, a run being cut where a chunk of SPAN tokens ends.
//
// A run that lies within one chunk is summed there. Of a run that is cut, every chunk leaves a part:
// row 1 of the chunk if the run starts in it, row 0 if the run comes from the chunk before.
//
// Macros: DTYPE, OUT float32|float16|bfloat16: elements of the gradients and of the result; THREADS;
//   VEC elements a thread owns of a row; SPAN tokens a chunk.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kPartsPerChunk = 2;
constexpr int kPartContinued = 0;
constexpr int kPartStarted = 1;

// Offset in floats of a part in parts[chunks, 2, hidden].
CUKIT_DEVICE long long part_offset(int chunk, int part, int hidden) {
  return (static_cast<long long>(chunk) * kPartsPerChunk + part) * hidden;
}

// Rounds and stores N neighbouring elements, 16 bytes at a time where there are as many.
template <typename Out, int N>
CUKIT_DEVICE void store_floats(Out* to, const float (&values)[N]) {
  constexpr int kMost = 16 / sizeof(Out);
  constexpr int kChunk = N < kMost ? N : kMost;
#pragma unroll
  for (int j = 0; j < N; j += kChunk) {
    Vec<Out, kChunk> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk[i] = from_float<Out>(values[j + i]);
    store(to + j, chunk);
  }
}

}  // namespace cukit
