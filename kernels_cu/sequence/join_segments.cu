// Initial states of the segments of a sequence, from the final state that each segment has for an
// initial state of 0.
//
//   before[0] = initial      before[s + 1] = 2^total_decay[s] before[s] + added[s]
//
// added[s] of the last segment is not used. With REVERSE the recurrence runs from the last segment
// to the first: it computes the gradients of the final states of the segments from the gradient of
// the final state of the sequence.
//
// Mapping: grid (parts of a state, sequence * heads + head of the launch), one thread per element;
// `states` holds added on entry and before on exit. Programmatic dependent launch: the next kernel
// may start early.
// Macros: REVERSE 0|1; CHANNELS 0|1; THREADS. Minimum architecture: sm_80. Sequential, hence deterministic.
// Reference: cukit/reference/sequence.py, gated_scan.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "sequence/parameters.cuh"

constexpr int kBatch = 8;  // segments that are read before the first is used

extern "C" __global__ void __launch_bounds__(THREADS) join_segments(
    const float* initial,                   // [num_sequences, num_heads, state_dim, head_dim] or null
    const float* total_decay,               // [num_sequences, segments, heads], with CHANNELS also
                                            // [.., state_dim], log2
    float* states,                          // [num_sequences, segments, heads, state_dim, head_dim]
    const __grid_constant__ cukit::ScanParameters p) {
  cukit::release_next_grid();
  cukit::wait_for_previous_grids();
  const int sequence = static_cast<int>(blockIdx.y) / p.heads;
  const int local_head = static_cast<int>(blockIdx.y) % p.heads;
  const long long whole = static_cast<long long>(sequence) * p.num_heads + p.first_head + local_head;
  const long long size = static_cast<long long>(p.state_dim) * p.head_dim;
  const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= size) return;
  float before = initial == nullptr ? 0.0f : initial[whole * size + at];
  for (int first = 0; first < p.segments; first += kBatch) {
    float added[kBatch], kept[kBatch];
    const auto place = [&](int turn) {
      const int segment = REVERSE ? p.segments - 1 - turn : turn;
      return (static_cast<long long>(sequence) * p.segments + segment) * p.heads + local_head;
    };
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i + 1 >= p.segments) break;
      const long long of = place(first + i);
      added[i] = states[of * size + at];
      kept[i] = exp2f(total_decay[CHANNELS ? of * p.state_dim + at / p.head_dim : of]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= p.segments) break;
      states[place(first + i) * size + at] = before;
      if (first + i + 1 < p.segments) before = fmaf(kept[i], before, added[i]);
    }
  }
}
