// One token per sequence of a gated linear recurrence; updates the states in place.
//
//   h = exp(l) h + b x^T      y = h^T c      l: one per head, or with CHANNELS one per row of h
//
// Memory-bound: a state is read and written once. Mapping: one block per (sequence, head). A thread
// processes VEC columns of every kRows-th row of the state; partial sums of y are reduced by
// shuffles, then in shared memory, in a fixed order.
// Shared memory: 4 * ((CHANNELS ? 3 : 2) * STATE_DIM + THREADS * VEC) bytes, dynamic.
// Macros: DTYPE float32|float16|bfloat16; STATE_DIM; HEAD_DIM; VEC 1|2|4, a divisor of HEAD_DIM;
//   CHANNELS 0|1; THREADS, a multiple of 32. STATE_DIM and HEAD_DIM are macros, because the kernel
//   takes 18 % longer if they are not constants.
// Minimum architecture: sm_80. Computes in float; deterministic.
// Reference: cukit/reference/sequence.py, gated_scan_step.
#include "common/platform.cuh"
#include "common/types.cuh"
#include "sequence/parameters.cuh"

using T = cukit::element_t;
using Values = cukit::Vec<float, VEC>;

constexpr int kBatch = 4;  // vectors of the state that a thread loads before it uses the first
constexpr int kVecs = HEAD_DIM / VEC;
constexpr int kWidth = kVecs < THREADS ? kVecs : THREADS;  // vectors of a row per iteration
constexpr int kRows = THREADS / kWidth;                    // rows of the state per iteration
constexpr int kBatches = (STATE_DIM + kBatch * kRows - 1) / (kBatch * kRows);
// Whether all threads have kBatch rows in each batch.
constexpr bool kFull = STATE_DIM > 0 && kRows * kWidth == THREADS && STATE_DIM % (kBatch * kRows) == 0;
// Whether a warp has whole rows, whose sums are reduced by shuffles.
constexpr bool kWholeRows = kWidth < cukit::kWarpSize && cukit::kWarpSize % kWidth == 0;
// Threads from one partial sum to the next.
constexpr int kStride = kWholeRows ? cukit::kWarpSize : kWidth;

CUKIT_DEVICE float decay_of(float l) { return expf(l != l ? l : fmaxf(fminf(l, 0.0f), -104.0f)); }

extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_step(
    float* __restrict__ states,           // [batch, num_heads, STATE_DIM, HEAD_DIM]
    const T* __restrict__ x,              // [batch, num_heads, HEAD_DIM]
    const T* __restrict__ b,              // [batch, num_groups, STATE_DIM]
    const T* __restrict__ c,              // [batch, num_groups, STATE_DIM]
    const float* __restrict__ log_decay,  // [batch, num_heads], with CHANNELS also [.., STATE_DIM]
    T* __restrict__ y,                    // [batch, num_heads, HEAD_DIM]
    const __grid_constant__ cukit::StepParameters p) {
  CUKIT_DYNAMIC_SHARED(float, memory);
  float* keys = memory;
  float* queries = memory + STATE_DIM;
  float* decays = memory + 2 * STATE_DIM;  // with CHANNELS
  float* sums = memory + (CHANNELS ? 3 : 2) * STATE_DIM;
  const int thread = static_cast<int>(threadIdx.x);
  const int sequence = static_cast<int>(blockIdx.x) / p.num_heads;
  const int head = static_cast<int>(blockIdx.x) % p.num_heads;
  const long long group = static_cast<long long>(sequence) * p.num_groups + head / p.heads_per_group;
  float* state = states + static_cast<long long>(blockIdx.x) * STATE_DIM * HEAD_DIM;
  const T* value = x + static_cast<long long>(blockIdx.x) * HEAD_DIM;
  T* out = y + static_cast<long long>(blockIdx.x) * HEAD_DIM;

  const int row = thread / kWidth;
  const bool has_rows = kFull || row < kRows;
  Values h[kBatch];
  float own[VEC];
  const auto read = [&](const float* column, int n) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = n + i * kRows;
      if (kFull || at < STATE_DIM) cukit::load(h[i], column + static_cast<long long>(at) * HEAD_DIM);
    }
  };
  const auto read_x = [&](int vec) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) own[j] = cukit::to_float(value[vec * VEC + j]);
  };
  if (has_rows) {
    read(state + thread % kWidth * VEC, row);
    read_x(thread % kWidth);
  }
  if constexpr (CHANNELS) log_decay += static_cast<long long>(blockIdx.x) * STATE_DIM;
  // Used after the barrier only: an earlier use would delay the loads that follow.
  const float log_of_head = CHANNELS ? 0.0f : log_decay[blockIdx.x];
#pragma unroll 1
  for (int n = thread; n < STATE_DIM; n += THREADS) {
    keys[n] = cukit::to_float(b[group * STATE_DIM + n]);
    queries[n] = cukit::to_float(c[group * STATE_DIM + n]);
    if constexpr (CHANNELS) decays[n] = decay_of(log_decay[n]);
  }
  __syncthreads();
  const float of_head = CHANNELS ? 0.0f : decay_of(log_of_head);

  for (int first = 0; first < kVecs; first += kWidth) {
    const int vec = first + thread % kWidth;
    float sum[VEC] = {};
    if (has_rows && vec < kVecs) {
      if (first > 0) read_x(vec);
      float* column = state + vec * VEC;
      for (int batch = 0; batch < kBatches; ++batch) {
        const int start = row + batch * kBatch * kRows;
        if (first > 0 || batch > 0) read(column, start);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int n = start + i * kRows;
          if (!kFull && n >= STATE_DIM) break;
          const float kept = CHANNELS ? decays[n] : of_head;
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            h[i][j] = fmaf(kept, h[i][j], keys[n] * own[j]);
            sum[j] = fmaf(queries[n], h[i][j], sum[j]);
          }
          cukit::store(column + static_cast<long long>(n) * HEAD_DIM, h[i]);
        }
      }
    }
    if constexpr (kWholeRows) {
#pragma unroll
      for (int offset = kWidth; offset < cukit::kWarpSize; offset *= 2) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += __shfl_xor_sync(cukit::kFullMask, sum[j], offset);
      }
    }
    if (thread % kStride < kWidth) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[thread * VEC + j] = sum[j];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < kWidth * VEC; i += THREADS) {
      float total = 0.0f;
#pragma unroll 16
      for (int from = 0; from < kRows * kWidth; from += kStride) total += sums[from * VEC + i];
      if (first * VEC + i < HEAD_DIM) out[first * VEC + i] = cukit::from_float<T>(total);
    }
    if (first + kWidth < kVecs) __syncthreads();
  }
}
