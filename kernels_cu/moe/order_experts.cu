// Second kernel of expert_order: the counts and offsets of the experts, the row of every choice, and
// the router's losses.
//
// Mapping: one block per chunk of tokens; the first also writes counts and offsets. With LOSSES one
//   more block computes the losses. Blocks may start while the first kernel still runs
//   (moe/expert_order.cuh).
// Shared memory: 4 * BINS * (THREADS / 32 + 2) bytes, with LOSSES THREADS / 8 more, static.
// Macros: moe/expert_order.cuh; LOSSES 0|1; POLLS 0|1: whether the first kernel is a router, which
//   writes `experts`; 1 with LOSSES.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/moe.py, expert_order and
//   topk_router.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "moe/expert_order.cuh"
#include "moe/router_losses.cuh"

static_assert(cukit::kCountsFit, "a thread reads at most one word of a chunk at once");
static_assert(POLLS || !LOSSES, "only a router has losses");

// With 1024 threads, at most 32 registers per thread, so that a block of the first kernel with 1024
// threads and 32 registers also fits on the SM.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 1024 ? 2 : 1) order_experts(
    const int* experts,                     // [num_tokens, top_k]
    const cukit::CountWord* chunk_counts,   // [chunks, ceil(num_experts / 4)]
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
  const bool computes_losses = LOSSES && chunk == chunks;
  cukit::clear_tables(tables, choices);
  if (POLLS && (computes_losses || !cukit::Choices::polled(p))) cukit::wait_for_previous_grids();
  __syncthreads();
  if (computes_losses) {
    __shared__ float scratch[cukit::kWarps];
    cukit::sum_counts(tables, chunk_counts, chunks, chunk, p.num_experts);
    __syncthreads();
    cukit::write_losses(losses, tables.earlier, chunk_sums, chunks, p, scratch);
    return;
  }
  const cukit::FirstChoice first = cukit::count_warps<POLLS>(tables, own, choices, p.num_experts);
  __syncthreads();
  cukit::rank_warps(tables, choices, p.num_experts);
  if (!POLLS) cukit::wait_for_previous_grids();
  cukit::sum_counts(tables, chunk_counts, chunks, chunk, p.num_experts);
  __syncthreads();
  cukit::scan_tables(tables, result, p, chunk == 0);
  // The weights of dropped choices become 0, after the router has written them.
  if (weights != nullptr) cukit::wait_for_previous_grids();
  cukit::place_choices(tables, own, choices, p, result, first);
  // Kernels after this one may read results of the first kernel.
  cukit::wait_for_previous_grids();
}
