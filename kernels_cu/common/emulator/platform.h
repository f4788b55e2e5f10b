// CUDA's language on a host C++ compiler: qualifiers, built-in variables and functions. Included by
// common/platform.cuh where CUKIT_EMULATE is defined.
#pragma once

#include "common/emulator/host_math.h"

#include <assert.h>
#include <cstdio>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "common/emulator/thread.h"

// Qualifiers. A block's threads share one operating-system thread, so that a thread_local variable
// is private to the block. The blocks of a cluster share that thread too: the runtime swaps the
// contents of these variables when it switches blocks.
#define __shared__ static thread_local
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
// The shape is passed to the runtime in the name of the kernel's section.
#define __cluster_dims__(...) CUKIT_CLUSTER_SECTION(__VA_ARGS__, 1, 1)
#define CUKIT_CLUSTER_SECTION(x, y, z, ...) CUKIT_CLUSTER_SECTION_(x, y, z)
#define CUKIT_CLUSTER_SECTION_(x, y, z) \
  __attribute__((section("cukit_cluster_" #x "_" #y "_" #z)))

#define threadIdx CUKIT_THREE_OF_SELF(uint3, thread_index)
#define blockIdx CUKIT_THREE_OF_SELF(uint3, block_index)
#define blockDim CUKIT_THREE_OF_SELF(dim3, block_dim)
#define gridDim CUKIT_THREE_OF_SELF(dim3, grid_dim)
constexpr int warpSize = 32;

#include "common/emulator/arithmetic.h"
#include "common/emulator/instructions.h"
#include "common/emulator/memory.h"
#include "common/emulator/warp.h"

// CUDA's headers above are compiled for the host; the kernels for the emulated device.
#define __CUDA_ARCH__ CUKIT_EMULATE

// A wrapper without a CPU body fails to compile; the error names the wrapper's line.
#define asm                                                                                  \
  static_assert(false, "this instruction is not emulated: it has no body under CUKIT_EMULATE"); \
  __asm__
