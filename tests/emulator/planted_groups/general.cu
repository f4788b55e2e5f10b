// Kernels with a bug if compiled with -DBUG=1, and without it otherwise. One block of 32, 64 or 256 threads.
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/tile.cuh"

namespace {

constexpr int kThreads = 256;

}  // namespace

// out[i] = x[255 - i], through shared memory.
extern "C" __global__ void missing_barrier(const float* x, float* out) {
  __shared__ float row[kThreads];
  row[threadIdx.x] = x[threadIdx.x];
#if !BUG
  __syncthreads();
#endif
  out[threadIdx.x] = row[kThreads - 1 - threadIdx.x];
}

// Two rounds use one buffer: the second must not start before the first has been read.
extern "C" __global__ void missing_second_barrier(const float* x, float* out) {
  __shared__ float row[kThreads];
  for (int round = 0; round < 2; ++round) {
    row[threadIdx.x] = x[round * kThreads + threadIdx.x];
    __syncthreads();
    out[round * kThreads + threadIdx.x] = row[kThreads - 1 - threadIdx.x];
#if !BUG
    __syncthreads();
#endif
  }
}

// Each warp passes a value to the next one.
extern "C" __global__ void race_between_warps(const float* x, float* out) {
  __shared__ float first[kThreads / 32];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) first[warp] = x[threadIdx.x];
#if BUG
  __syncwarp();
#else
  __syncthreads();
#endif
  out[threadIdx.x] = first[(warp + 1) % (kThreads / 32)];
}

extern "C" __global__ void outside_dynamic_shared(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 256 floats
  row[threadIdx.x + BUG] = x[threadIdx.x];
  if (BUG && threadIdx.x == 0) row[0] = 0.0f;
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x];
}

extern "C" __global__ void outside_static_shared(const float* x, float* out) {
  __shared__ float row[kThreads];
  __shared__ float guard[32];  // the bug writes here: only bounds per variable detect it
  if (threadIdx.x < 32) guard[threadIdx.x] = 0.0f;
  __syncthreads();
  row[threadIdx.x + BUG] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x] + guard[threadIdx.x % 32];
}

extern "C" __global__ void outside_global(const float* x, float* out) {
  out[threadIdx.x] = x[threadIdx.x + BUG];
}

extern "C" __global__ void misaligned_vector_load(const float* x, float* out) {
  const float4 four = *reinterpret_cast<const float4*>(x + 4 * threadIdx.x + BUG);
  out[threadIdx.x] = four.x;
}

// Every thread reads data that another thread has copied.
extern "C" __global__ void missing_copy_wait(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, row);  // 1024 floats
  cukit::cp_async_16(cukit::shared_address(row + 4 * threadIdx.x), x + 4 * threadIdx.x);
  cukit::cp_async_commit();
#if !BUG
  cukit::cp_async_wait<0>();
#endif
  __syncthreads();
  out[threadIdx.x] = row[4 * (kThreads - 1 - threadIdx.x)];
}

// Waits for one of two groups and reads the other.
extern "C" __global__ void wait_for_the_wrong_group(const float* x, float* out) {
  CUKIT_DYNAMIC_SHARED(float, rows);  // 2 x 1024 floats
  for (int group = 0; group < 2; ++group) {
    const int at = group * 4 * kThreads + 4 * threadIdx.x;
    cukit::cp_async_16(cukit::shared_address(rows + at), x + at);
    cukit::cp_async_commit();
  }
  cukit::cp_async_wait<BUG>();
  __syncthreads();
  out[threadIdx.x] = rows[4 * kThreads + 4 * (kThreads - 1 - threadIdx.x)];
}

// 64 threads: with the bug, the two warps pass different thread counts to the named barrier.
extern "C" __global__ void mismatched_barrier(const float* x, float* out) {
  __shared__ float row[64];
  row[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < 32) {
    cukit::named_sync(1, 64);
  } else {
    cukit::named_sync(1, BUG ? 32 : 64);
  }
  out[threadIdx.x] = row[63 - threadIdx.x];
}

// A barrier in a branch that only part of a warp takes.
extern "C" __global__ void divergent_barrier(const float* x, float* out) {
  __shared__ float row[kThreads];
  row[threadIdx.x] = x[threadIdx.x];
  if (!BUG || threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = row[kThreads - 1 - threadIdx.x];
}

// Lanes of one warp at two barriers.
extern "C" __global__ void two_barriers_in_a_warp(const float* x, float* out) {
  __shared__ float row[kThreads];
  row[threadIdx.x] = x[threadIdx.x];
#if BUG
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
#else
  __syncthreads();
#endif
  out[threadIdx.x] = row[kThreads - 1 - threadIdx.x];
}

// One warp: a 16x32 tile of 16-bit elements, written with the swizzle of its width and read with
// ldmatrix. BUG reads with another swizzle phase.
extern "C" __global__ void wrong_software_swizzle(const uint4* x, unsigned* out) {
  using Layout = cukit::Swizzle<32>;
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);  // 1024 bytes
  for (int i = threadIdx.x; i < 64; i += 32) {
    *reinterpret_cast<uint4*>(tile + Layout::offset(i / 4, i % 4)) = x[i];
  }
  __syncwarp();
  const int lane = threadIdx.x;
  unsigned address = cukit::shared_address(tile) + Layout::offset(lane % 16, lane / 16);
  if (BUG) address ^= 16;
  unsigned r[4];
  cukit::ldmatrix_x4(r, address);
  for (int i = 0; i < 4; ++i) out[i * 32 + lane] = r[i];
}

// Two halves of a warp at different shuffles, each with the full mask.
extern "C" __global__ void shuffle_of_half_a_warp(const float* x, float* out) {
  float value = x[threadIdx.x];
  if (!BUG || threadIdx.x % 32 < 16) {
    value = __shfl_xor_sync(0xffffffffu, value, 1);
  } else {
    value = __shfl_down_sync(0xffffffffu, value, 1);
  }
  out[threadIdx.x] = value;
}

// Reads shared memory that no thread has written.
extern "C" __global__ void uninitialised_shared(const float* x, float* out) {
  __shared__ float row[kThreads];
  if (!BUG || threadIdx.x != 7) row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = row[kThreads - 1 - threadIdx.x];
}
