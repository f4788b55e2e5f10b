// Gated activations over rows that hold gate and up projection side by side.
//
//   forward    out = f(gate) * up
//   backward   grad_gate = grad_out * up * f'(gate)      grad_up = grad_out * f(gate)
//
// Mapping: the vectors of [rows, cols] are numbered row by row; a block processes THREADS *
//   VECS_PER_THREAD consecutive vectors, thread t the t-th of every THREADS; all loads are issued
//   before the first use. One pass over memory.
// Macros: DTYPE float32|float16|bfloat16; THREADS; VEC elements per access (VEC * sizeof(DTYPE) <=
//   16), a divisor of cols; VECS_PER_THREAD; INDEX uint32|uint64, which must hold twice the number
//   of vectors.
#pragma once

#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/types.cuh"

namespace cukit {

// Offset of the gate of vector `index` in [rows, 2 * cols]; its up projection is `cols` elements
// further.
CUKIT_DEVICE long long gate_offset(index_t index, index_t vecs_per_row) {
  return static_cast<long long>(index + index / vecs_per_row * vecs_per_row) * VEC;
}

template <typename Activation, typename T>
CUKIT_DEVICE void gated_forward(const T* __restrict__ x, T* __restrict__ out, long long num_vecs,
                                int vecs_per_row) {
  const index_t first = static_cast<index_t>(blockIdx.x) * (THREADS * VECS_PER_THREAD) + threadIdx.x;
  const long long cols = static_cast<long long>(vecs_per_row) * VEC;

  Vec<T, VEC> gate[VECS_PER_THREAD], up[VECS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
    const T* from = x + gate_offset(index, vecs_per_row);
    load<Cache::Kept>(gate[i], from);
    load<Cache::Kept>(up[i], from + cols);
  }
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      up[i][j] = from_float<T>(Activation::value(to_float(gate[i][j])) * to_float(up[i][j]));
    }
    store(out + static_cast<long long>(index) * VEC, up[i]);
  }
}

template <typename Activation, typename T>
CUKIT_DEVICE void gated_backward(const T* __restrict__ grad_out, const T* __restrict__ x,
                                 T* __restrict__ grad_x, long long num_vecs, int vecs_per_row) {
  const index_t first = static_cast<index_t>(blockIdx.x) * (THREADS * VECS_PER_THREAD) + threadIdx.x;
  const long long cols = static_cast<long long>(vecs_per_row) * VEC;

  Vec<T, VEC> gate[VECS_PER_THREAD], up[VECS_PER_THREAD], grad[VECS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
    const T* from = x + gate_offset(index, vecs_per_row);
    load<Cache::Kept>(gate[i], from);
    load<Cache::Kept>(up[i], from + cols);
    load<Cache::Kept>(grad[i], grad_out + static_cast<long long>(index) * VEC);
  }
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float g = to_float(grad[i][j]);
      float slope;
      const float value = Activation::value_and_slope(to_float(gate[i][j]), &slope);
      gate[i][j] = from_float<T>(g * to_float(up[i][j]) * slope);
      up[i][j] = from_float<T>(g * value);
    }
    T* to = grad_x + gate_offset(index, vecs_per_row);
    store(to, gate[i]);
    store(to + cols, up[i]);
  }
}

}  // namespace cukit
