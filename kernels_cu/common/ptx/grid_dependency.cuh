// griddepcontrol (sm_90): programmatic dependent launch, a kernel that starts while the previous
// one on its stream still runs (cukit/core/dependent_launch.py). Without such a launch, on older
// GPUs and in the emulator, both functions are no-ops.
//
// A pointer to memory that a kernel still running may write must not be __restrict__. The qualifier
// promises that nothing else writes the array while this kernel runs, so the compiler may load
// elements before the wait, and through the non-coherent cache
// (tests/core/test_dependent_launch.py).
#pragma once

#include "common/platform.cuh"

namespace cukit {

// The next kernel may start once every block has called this or exited.
CUKIT_DEVICE void release_next_grid() {
#if !defined(CUKIT_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernels have completed and their writes are visible.
CUKIT_DEVICE void wait_for_previous_grids() {
#if !defined(CUKIT_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cukit
