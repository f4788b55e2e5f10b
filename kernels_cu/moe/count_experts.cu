// First kernel of expert_order: the number of choices of each expert in each chunk of tokens.
//
// Mapping: one block per chunk. Shared memory: 4 * BINS bytes, static.
// Macros: moe/expert_order.cuh.
// Minimum architecture: sm_80. Integer counts: deterministic. Reference: cukit/reference/moe.py,
//   expert_order.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "moe/expert_order.cuh"

static_assert(cukit::kCountsFit, "a thread writes at most one word of counts");

extern "C" __global__ void __launch_bounds__(THREADS) count_experts(
    const int* __restrict__ experts,  // [num_tokens, top_k]
    cukit::CountWord* counts,         // [chunks, ceil(num_experts / 4)]
    const __grid_constant__ cukit::RoutingParameters p) {
  __shared__ int bins[BINS];
  cukit::release_next_grid();
  cukit::clear_bins(bins);
  __syncthreads();
  const cukit::Choices choices(p, blockIdx.x);
  for (int i = threadIdx.x; i < choices.count; i += THREADS) {
    const unsigned expert = experts[choices.first + i];
    if (expert < p.num_experts) atomicAdd(&bins[expert], 1);
  }
  __syncthreads();
  cukit::write_counts(counts, bins, p.num_experts);
}
