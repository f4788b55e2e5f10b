// Gradient of embedding, first step: sums gradient rows over runs of equal ids within each chunk.
//
//   grad_weight[id] = sum of grad_out[n] over the tokens n with ids[n] == id
//
// Tokens are sorted by id (count_digits.cu, scatter_by_digit.cu). A run that crosses chunks leaves
// one partial sum per chunk in `parts`; embedding_backward_join.cu adds these up.
// Mapping: block (c, s) sums the SPAN tokens of chunk c in slice s of THREADS * VEC columns; a
//   thread sums VEC consecutive columns and loads kAhead rows at a time.
// Shared memory: 8 * SPAN + 8 bytes, static. Macros: layers/runs.cuh. Requires hidden % VEC == 0.
// Minimum architecture: sm_80. Accumulates in float in token order: deterministic. Reference:
//   cukit/reference/embedding.py.
#include "common/platform.cuh"
#include "layers/runs.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;
using Out = cukit::OUT;

constexpr int kAhead = 8;  // rows in flight
constexpr int kResidentThreads = 768;  // per SM: allows 80 registers per thread, for these rows
static_assert(SPAN % kAhead == 0, "a chunk is a multiple of kAhead rows");

}  // namespace

extern "C" __global__ void
__launch_bounds__(THREADS, kResidentThreads / THREADS) embedding_backward(
    const T* __restrict__ grad_out,              // [num_tokens, hidden]
    const unsigned int* __restrict__ keys,       // [num_tokens], ascending; >= num_keys: ignored
    const int* __restrict__ tokens,              // [num_tokens], the token of each key
    Out* __restrict__ grad_weight,               // [num_keys, hidden], zeroed
    float* __restrict__ parts,                   // [chunks, 2, hidden]
    int num_tokens, int num_keys, int hidden) {
  // keys_near[1 + i] is key i of the chunk; the ends are keys of the adjacent chunks.
  __shared__ unsigned int keys_near[SPAN + 2];
  __shared__ int tokens_here[SPAN];
  const int chunk = blockIdx.x;
  const int begin = chunk * SPAN;
  const int count = min(SPAN, num_tokens - begin);
  for (int i = threadIdx.x; i < SPAN + 2; i += THREADS) {
    const int position = begin + i - 1;
    const bool present = position >= 0 && position < num_tokens;
    keys_near[i] = present ? keys[position] : 0xffffffffu;
    if (i < count) tokens_here[i] = tokens[begin + i];
  }
  __syncthreads();
  const int col = (blockIdx.y * THREADS + threadIdx.x) * VEC;
  if (col >= hidden) return;

  float sum[VEC] = {};
  bool continued = keys_near[0] == keys_near[1];
  for (int base = 0; base < count; base += kAhead) {
    cukit::Vec<T, VEC> rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i >= count) continue;
      const long long row = static_cast<long long>(tokens_here[base + i]) * hidden;
      cukit::load<cukit::Cache::Kept>(rows[i], grad_out + row + col);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i >= count) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] += cukit::to_float(rows[i][j]);
      const unsigned int key = keys_near[base + i + 1];
      const bool ends = keys_near[base + i + 2] != key;
      if (!ends && base + i + 1 < count) continue;
      if (key < num_keys) {
        if (ends && !continued) {
          cukit::store_floats(grad_weight + static_cast<long long>(key) * hidden + col, sum);
        } else {
          const int part = continued ? cukit::kPartContinued : cukit::kPartStarted;
          cukit::store_floats(parts + cukit::part_offset(chunk, part, hidden) + col, sum);
        }
      }
      continued = false;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] = 0.0f;
    }
  }
}
