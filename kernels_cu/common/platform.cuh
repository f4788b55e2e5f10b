// The portability layer between CUDA and the CPU emulator. First include of every kernel; only this
// file and those in common/ptx may depend on CUKIT_EMULATE.
//
// CUKIT_DEVICE                       qualifiers of a small device function
// CUKIT_DYNAMIC_SHARED(type, name)   `type* name` = the block's dynamic shared memory, 1024-byte
//                                    aligned (the largest alignment that a TMA swizzle requires)
// CUKIT_OFFSET(type, field)          bytes of a struct before a field, a constant
#pragma once

#ifdef CUKIT_EMULATE  // the emulated architecture, e.g. 900

#include <common/emulator/platform.h>

#define CUKIT_DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(::cukit::emulator::dynamic_shared_memory())
#define CUKIT_OFFSET(type, field) __builtin_offsetof(type, field)

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define CUKIT_DYNAMIC_SHARED(type, name)                             \
  extern __shared__ __align__(1024) unsigned char cukit_shared_[];   \
  type* name = reinterpret_cast<type*>(cukit_shared_)
// NVRTC has no offsetof; this is what its front end expands offsetof to.
#define CUKIT_OFFSET(type, field) __INTADDR__(&static_cast<type*>(0)->field)

#endif

#define CUKIT_DEVICE __device__ __forceinline__

namespace cukit {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// NVRTC has no <cmath>.
CUKIT_DEVICE float infinity() { return __int_as_float(0x7f800000); }

}  // namespace cukit
