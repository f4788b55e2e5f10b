// Second kernel of expert_order: the experts' offsets, the row of every choice, and the router's
// losses.
//
// Mapping: one block per chunk of tokens; the first also writes counts and offsets. With LOSSES one
//   more block computes the losses. Blocks may start while the first kernel still runs, and
//   then wait for it. The arrays that it writes are not __restrict__, which would let the compiler
//   load them before the wait.
// Shared memory: 4 * BINS * (THREADS / 32 + 1) bytes, static. Macros: moe/expert_order.cuh; LOSSES
//   0|1.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/moe.py, expert_order and
//   topk_router.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "moe/expert_order.cuh"
#include "moe/router_losses.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) order_experts(
    const int* experts,                     // [num_tokens, top_k]
    const unsigned short* chunk_counts,     // [chunks, num_experts]
    const float* chunk_sums,                // [chunks, num_experts + 1], with LOSSES
    int* __restrict__ rows,                 // [num_tokens, top_k]
    int* __restrict__ counts,               // [num_experts]
    int* __restrict__ offsets,              // [num_experts + 1]
    float* __restrict__ weights,            // [num_tokens, top_k] with a capacity, else null
    float* __restrict__ losses,             // [2]: balance, z; with LOSSES
    const __grid_constant__ cukit::RoutingParameters p) {
  __shared__ cukit::OrderTables tables;
  const cukit::OrderResult result{rows, counts, offsets, weights};
  const int chunks = gridDim.x - LOSSES;
  const int chunk = blockIdx.x;
  const cukit::Choices choices(p, chunk);
  const int* const own = experts + choices.first;
  cukit::clear_tables(tables, choices);
  cukit::wait_for_previous_grids();
  const int first = cukit::first_expert(own, choices);
  __syncthreads();
  cukit::sum_counts(tables, chunk_counts, chunks, chunk, p.num_experts);
  if (LOSSES && chunk == chunks) {
    __shared__ float scratch[cukit::kWarps];
    __syncthreads();
    cukit::write_losses(losses, tables.totals, chunk_sums, chunks, p, scratch);
    return;
  }
  cukit::count_warps(tables, own, choices, p.num_experts, first);
  __syncthreads();
  cukit::scan_tables(tables, choices, result, p.num_experts, chunk == 0);
  cukit::place_choices(tables, own, choices, p, result, first);
}
