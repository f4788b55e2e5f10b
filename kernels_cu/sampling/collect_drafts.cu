// The tokens that the verification of drafts appends to each request: the drafts before the first
// rejected one, then the token drawn in place of the rejected draft or, if all are accepted, after
// the last draft.
//
// Mapping: one thread per request. Macros: THREADS. Minimum architecture: sm_80.
// Reference: cukit/reference/sampling.py, speculative_verify.
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "sampling/parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) collect_drafts(
    const int* drawn,     // [requests, num_drafts + 1]
    const int* accepted,  // [requests, num_drafts + 1]: 1, 0, or -1: invalid row
    int* tokens,          // [requests, num_drafts + 1]; -1 past the last
    int* num_accepted,    // [requests]; -1: invalid row
    const __grid_constant__ cukit::CollectParameters p) {
  cukit::wait_for_previous_grids();
  const int request = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
  if (request >= p.num_requests) return;
  const long long first = static_cast<long long>(request) * (p.num_drafts + 1);
  int count = 0;
  while (count < p.num_drafts && accepted[first + count] == 1) ++count;
  const bool refused = accepted[first + count] < 0;
  for (int i = 0; i <= p.num_drafts; ++i) {
    tokens[first + i] = i <= count ? drawn[first + i] : -1;
  }
  num_accepted[request] = refused ? -1 : count;
}
