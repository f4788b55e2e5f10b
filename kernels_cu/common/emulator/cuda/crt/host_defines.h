// Replaces crt/host_defines.h of CUDA's compiler package, which the runtime's headers include:
// defines CUDA's qualifiers for a host C++ compiler.
#pragma once

#define __host__
#define __device__
#define __global__ __attribute__((noinline))  // the kernel has a frame in reports and debuggers
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define CUDARTAPI
#define CUDAAPI
#define __annotate__(a) __attribute__((a))
#define __location__(a)
