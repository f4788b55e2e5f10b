// griddepcontrol (sm_90): a kernel that starts while the one before it on its stream still runs
// (programmatic dependent launch, cukit/core/dependent_launch.py). Without such a launch, and on older
// GPUs, these do nothing.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// The kernel that follows may start as soon as every block has come here or ended.
CUKIT_DEVICE void release_next_grid() {
#if !defined(CUKIT_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended and what they wrote is visible.
CUKIT_DEVICE void wait_for_previous_grids() {
#if !defined(CUKIT_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cukit
