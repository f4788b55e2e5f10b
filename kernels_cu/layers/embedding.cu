// Embedding look-up: out[n] = weight[ids[n]]. An id out of range yields a row of NaN.
//
// Mapping: the vectors of [tokens, hidden] are numbered row by row. A block copies THREADS *
//   VECS_PER_THREAD consecutive vectors; thread t copies vectors t, t + THREADS, ... of the block.
//   A thread issues all its loads before the first store. No shared memory.
// Macros: DTYPE float32|float16|bfloat16; ID int32|int64; THREADS; VEC elements per access (VEC *
//   sizeof(DTYPE) <= 16), a divisor of hidden; VECS_PER_THREAD; INDEX uint32|uint64, which must
//   hold the number of vectors plus one block's.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/embedding.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/types.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) embedding(
    const cukit::id_t* __restrict__ ids,  // [tokens]
    const T* __restrict__ weight,         // [num_embeddings, hidden]
    T* __restrict__ out,                  // [tokens, hidden]
    long long num_vecs,                   // tokens * hidden / VEC
    int vecs_per_row,                     // hidden / VEC
    int num_embeddings) {
  const cukit::index_t row_vecs = vecs_per_row;
  const cukit::index_t first =
      static_cast<cukit::index_t>(blockIdx.x) * (THREADS * VECS_PER_THREAD) + threadIdx.x;

  long long rows[VECS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const cukit::index_t index = first + i * THREADS;
    if (index < num_vecs) rows[i] = ids[index / row_vecs];
  }
  cukit::Vec<T, VEC> values[VECS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const cukit::index_t index = first + i * THREADS;
    if (index >= num_vecs) continue;
    if (rows[i] >= 0 && rows[i] < num_embeddings) {
      const long long vec = rows[i] * vecs_per_row + index % row_vecs;
      cukit::load(values[i], weight + vec * VEC);
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j) values[i][j] = cukit::from_float<T>(__int_as_float(0x7fffffff));
    }
  }
#pragma unroll
  for (int i = 0; i < VECS_PER_THREAD; ++i) {
    const cukit::index_t index = first + i * THREADS;
    if (index < num_vecs) cukit::store(out + static_cast<long long>(index) * VEC, values[i]);
  }
}
