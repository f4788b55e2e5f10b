// Builds a linked list of the writes to each row of a memory: heads[i] is the first write to row i,
// next[w] the write after w; -1 marks the end. Writes to rows out of range are in no list.
//
// The order within a list depends on the order of the atomics and differs between runs; results
// computed from a list must not depend on it (reproducible_sums.cuh).
// Mapping: one thread per write. Shared memory: none. Macros: THREADS. Minimum architecture: sm_80.
// Reference: cukit/reference/graph_memory.py, memory_write.
#include "common/platform.cuh"
#include "graph_memory/parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) link_writes(
    const int* __restrict__ indices,  // [num_writes]
    int* __restrict__ heads,          // [num_rows], initialised to -1
    int* __restrict__ next,           // [num_writes]
    const __grid_constant__ cukit::WriteParameters p) {
  const int write = blockIdx.x * THREADS + threadIdx.x;
  if (write >= p.num_writes) return;
  const int row = indices[write];
  next[write] = row >= 0 && row < p.num_rows ? atomicExch(heads + row, write) : -1;
}
