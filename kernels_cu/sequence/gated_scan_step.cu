// One token per sequence of a gated linear recurrence; updates the states in place.
//
//   h = exp(l) h + b x^T      y = h^T c      l: one per head, or with CHANNELS one per row of h
//
// Memory-bound: a state is read and written once. Mapping: one block per (sequence, head). A thread processes VEC
// columns of every rows-th row of the state; partial sums of y are reduced in shared memory in a fixed order.
// Shared memory: 4 * ((CHANNELS ? 3 : 2) * state_dim + THREADS * VEC) bytes, dynamic.
// Macros: DTYPE float32|float16|bfloat16; VEC 1|2|4, a divisor of head_dim; CHANNELS 0|1; THREADS.
// Minimum architecture: sm_80. Computes in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_step.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;
constexpr int kBatch = 8;  // vectors of the state that a thread loads before it uses the first
using Values = cukit::Vec<float, VEC>;

CUKIT_DEVICE float decay_of(float l) { return expf(l != l ? l : fmaxf(fminf(l, 0.0f), -104.0f)); }

extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_step(
    float* __restrict__ states,           // [batch, num_heads, state_dim, head_dim]
    const T* __restrict__ x,              // [batch, num_heads, head_dim]
    const T* __restrict__ b,              // [batch, num_groups, state_dim]
    const T* __restrict__ c,              // [batch, num_groups, state_dim]
    const float* __restrict__ log_decay,  // [batch, num_heads], with CHANNELS also [.., state_dim]
    T* __restrict__ y,                    // [batch, num_heads, head_dim]
    const __grid_constant__ cukit::StepParameters p) {
  CUKIT_DYNAMIC_SHARED(float, memory);
  float* keys = memory;
  float* queries = memory + p.state_dim;
  float* decays = memory + 2 * p.state_dim;  // with CHANNELS
  float* sums = memory + (CHANNELS ? 3 : 2) * p.state_dim;
  const int thread = static_cast<int>(threadIdx.x);
  const int sequence = static_cast<int>(blockIdx.x) / p.num_heads;
  const int head = static_cast<int>(blockIdx.x) % p.num_heads;
  const long long group = static_cast<long long>(sequence) * p.num_groups + head / (p.num_heads / p.num_groups);
  float* state = states + static_cast<long long>(blockIdx.x) * p.state_dim * p.head_dim;
  const T* value = x + static_cast<long long>(blockIdx.x) * p.head_dim;
  T* out = y + static_cast<long long>(blockIdx.x) * p.head_dim;

  // Vectors of VEC columns, up to THREADS per iteration.
  const int vecs = p.head_dim / VEC;
  const int width = min(vecs, THREADS);
  const int rows = THREADS / width;  // of the state, per iteration
  const int row = thread / width;
  const auto read = [&](Values (&h)[kBatch], const float* column, int n) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (n + i * rows < p.state_dim) cukit::load(h[i], column + static_cast<long long>(n + i * rows) * p.head_dim);
    }
  };
  Values h[kBatch];
  const bool holds = row < rows;
  if (holds && thread % width < vecs) read(h, state + thread % width * VEC, row);
  if constexpr (CHANNELS) log_decay += static_cast<long long>(blockIdx.x) * p.state_dim;
  const float of_head = CHANNELS ? 0.0f : decay_of(log_decay[blockIdx.x]);
  for (int n = thread; n < p.state_dim; n += THREADS) {
    keys[n] = cukit::to_float(b[group * p.state_dim + n]);
    queries[n] = cukit::to_float(c[group * p.state_dim + n]);
    if constexpr (CHANNELS) decays[n] = decay_of(log_decay[n]);
  }
  __syncthreads();

  for (int first = 0; first < vecs; first += width) {
    const int vec = first + thread % width;
    float sum[VEC] = {};
    if (holds && vec < vecs) {
      float own[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) own[j] = cukit::to_float(value[vec * VEC + j]);
      float* column = state + vec * VEC;
      for (int start = row; start < p.state_dim; start += kBatch * rows) {
        if (first > 0 || start > row) read(h, column, start);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int n = start + i * rows;
          if (n >= p.state_dim) break;
          const float kept = CHANNELS ? decays[n] : of_head;
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            h[i][j] = fmaf(kept, h[i][j], keys[n] * own[j]);
            sum[j] = fmaf(queries[n], h[i][j], sum[j]);
          }
          cukit::store(column + static_cast<long long>(n) * p.head_dim, h[i]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) sums[thread * VEC + j] = sum[j];
    __syncthreads();
    for (int i = thread; i < width * VEC; i += THREADS) {
      float total = 0.0f;
      for (int r = 0; r < rows; ++r) total += sums[r * width * VEC + i];
      if (first * VEC + i < p.head_dim) out[first * VEC + i] = cukit::from_float<T>(total);
    }
    __syncthreads();
  }
}
