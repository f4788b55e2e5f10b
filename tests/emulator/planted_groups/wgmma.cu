// Bugs in the use of wgmma's registers, groups and warpgroups. Each function contains one bug if
// `planted` is true, and is correct otherwise. One block of 256 threads, in which the second
// warpgroup multiplies.
//
// Each function computes out = x x^T, [64, 64], from a tile of 64 x 64 float16 in shared memory.
#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"

namespace {

constexpr int kGroup = 128;  // first thread that multiplies
constexpr int kSteps = 4;    // of 16 columns

using Sums = float[32];
using Fragment = unsigned[4];

// No swizzle: core matrices of eight 16-byte rows, first along the columns, then along the rows.
CUKIT_DEVICE unsigned long long operand(const unsigned char* tile, int step) {
  return cukit::matrix_descriptor(tile + step * 256, cukit::OperandSwizzle::None, 128, 1024);
}

// Byte offset of 16-byte chunk `chunk` of a row.
CUKIT_DEVICE int place_of(int row, int chunk) { return row / 8 * 1024 + chunk * 128 + row % 8 * 16; }

// Copies x to the tile; `visible`: with the proxy fence that wgmma needs.
CUKIT_DEVICE void fetch(unsigned char* tile, const uint4* x, bool visible) {
  for (int i = threadIdx.x; i < 512; i += blockDim.x) {
    *reinterpret_cast<uint4*>(tile + place_of(i / 8, i % 8)) = x[i];
  }
  if (visible) cukit::fence_proxy_async();
  __syncthreads();
}

CUKIT_DEVICE void multiply(Sums& sums, const unsigned char* tile, int first = 0, int last = kSteps) {
  for (int step = first; step < last; ++step) {
    cukit::wgmma<__half, 64>(sums, operand(tile, step), operand(tile, step), step > 0);
  }
}

CUKIT_DEVICE void store(float* out, const Sums& sums) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  for (int i = 0; i < 32; ++i) {
    out[(row + 8 * (i / 2 % 2)) * 64 + 8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2] = sums[i];
  }
}

// Loads the warp's 16 rows and the step's 16 columns of the tile as operand a.
CUKIT_DEVICE void load_fragment(Fragment& a, const unsigned char* tile, int step) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
  cukit::ldmatrix_x4(a, cukit::shared_address(tile + place_of(row, 2 * step + threadIdx.x % 32 / 16)));
}

CUKIT_DEVICE void accumulators_read_in_flight(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  if (planted) store(out, sums);
  cukit::wgmma_wait<0>(sums);
  if (!planted) store(out, sums);
}

CUKIT_DEVICE void accumulators_changed_in_flight(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  if (planted) sums[0] = 0.0f;
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// All steps use the same registers: the wgmma of a step must have read them before the next load.
CUKIT_DEVICE void operand_a_changed_in_flight(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  Fragment a;
  for (int step = 0; step < kSteps; ++step) {
    load_fragment(a, tile, step);
    cukit::wgmma_fence();
    cukit::wgmma<__half, 64>(sums, a, operand(tile, step), step > 0);
    cukit::wgmma_commit();
    if (!planted) cukit::wgmma_wait<0>(sums);
  }
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// Reading operand a while a wgmma reads it is legal; writing it is the bug.
CUKIT_DEVICE void operand_a_read_in_flight(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  Fragment a[kSteps];
  for (int step = 0; step < kSteps; ++step) load_fragment(a[step], tile, step);
  cukit::wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    cukit::wgmma<__half, 64>(sums, a[step], operand(tile, step), step > 0);
  }
  cukit::wgmma_commit();
  unsigned all = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < 4; ++i) all |= a[step][i];
  }
  if (planted) a[0][0] = all;
  cukit::wgmma_wait<0>(sums);
  if (all != 0) store(out, sums);
}

CUKIT_DEVICE void missing_commit(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  if (!planted) cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// The last wgmma is not in a committed group.
CUKIT_DEVICE void commit_too_early(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile, 0, kSteps - 1);
  if (planted) cukit::wgmma_commit();
  multiply(sums, tile, kSteps - 1, kSteps);
  if (!planted) cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// Two groups are in flight; the bug is to read the second after a wait for the first alone.
CUKIT_DEVICE void lax_wait(unsigned char* tile, float* out, bool planted) {
  Sums first, second;
  cukit::wgmma_fence();
  multiply(first, tile);
  cukit::wgmma_commit();
  multiply(second, tile);
  cukit::wgmma_commit();
  if (planted) {
    cukit::wgmma_wait<1>(second);
  } else {
    cukit::wgmma_wait<0>(second);
  }
  store(out, second);
  cukit::wgmma_wait<0>(first);
}

// Two groups are in flight; the bug is to overwrite the tile while the second still reads it.
CUKIT_DEVICE void lax_wait_for_an_operand(unsigned char* tile, float* out, bool planted) {
  Sums first, second;
  cukit::wgmma_fence();
  multiply(first, tile);
  cukit::wgmma_commit();
  multiply(second, tile);
  cukit::wgmma_commit();
  if (planted) {
    cukit::wgmma_wait<1>(first);
  } else {
    cukit::wgmma_wait<0>(first);
  }
  cukit::named_sync(1, 128);
  reinterpret_cast<unsigned*>(tile)[threadIdx.x % 128] = 0;
  cukit::wgmma_wait<0>(second);
  store(out, first);
}

// A warp overwrites the tile after its own wait; the wgmmas of other warps may still read the tile.
CUKIT_DEVICE void missing_barrier_after_the_wait(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  if (!planted) cukit::named_sync(1, 128);
  reinterpret_cast<unsigned*>(tile)[threadIdx.x % 128] = 0;
  store(out, sums);
}

CUKIT_DEVICE void exit_in_flight(unsigned char* tile, float* out, bool planted) {
  Sums sums, unused;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
  cukit::wgmma_fence();
  multiply(unused, tile);
  cukit::wgmma_commit();
  if (!planted) cukit::wgmma_wait<0>(unused);
}

CUKIT_DEVICE void missing_first_fence(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  if (!planted) cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

CUKIT_DEVICE void missing_fence_after_the_accumulators(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  for (float& sum : sums) sum = 0.0f;
  if (!planted) cukit::wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    cukit::wgmma<__half, 64>(sums, operand(tile, step), operand(tile, step), true);
  }
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// A wgmma overwrites accumulators that have been read: without a fence it may overtake the reads.
CUKIT_DEVICE void missing_fence_after_a_read(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  for (int round = 0; round < 2; ++round) {
    if (round == 0 || !planted) cukit::wgmma_fence();
    multiply(sums, tile);
    cukit::wgmma_commit();
    cukit::wgmma_wait<0>(sums);
    store(out, sums);
  }
}

CUKIT_DEVICE void missing_fence_after_operand_a(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  Fragment a[kSteps];
  if (planted) cukit::wgmma_fence();
  for (int step = 0; step < kSteps; ++step) load_fragment(a[step], tile, step);
  if (!planted) cukit::wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    cukit::wgmma<__half, 64>(sums, a[step], operand(tile, step), step > 0);
  }
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// A wgmma of half the columns, in the first half of the accumulators, precedes one of all columns.
CUKIT_DEVICE void missing_fence_between_shapes(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  auto& half = reinterpret_cast<float(&)[16]>(sums);
  cukit::wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    cukit::wgmma<__half, 32>(half, operand(tile, step), operand(tile, step), step > 0);
  }
  if (!planted) cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// Accumulators of one wgmma are operand a of the next.
CUKIT_DEVICE void accumulators_as_operand_a(unsigned char* tile, float* out, bool planted) {
  Sums sums, other;
  Fragment a;
  load_fragment(a, tile, 0);
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  auto& fragment = planted ? reinterpret_cast<Fragment&>(sums) : a;
  cukit::wgmma<__half, 64>(other, fragment, operand(tile, 0), false);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(other);
  store(out, sums);
}

CUKIT_DEVICE void half_a_warpgroup(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  if (planted && threadIdx.x % 128 >= 64) return;
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// The other half skips the products and waits at the commit.
CUKIT_DEVICE void half_a_warpgroup_waits(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  if (!planted || threadIdx.x % 128 < 64) multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::named_sync(1, 128);
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// The other half polls.
CUKIT_DEVICE void half_a_warpgroup_polls(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  while (planted && threadIdx.x % 128 >= 64) __nanosleep(100);
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

CUKIT_DEVICE void waits_differ(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  if (planted && threadIdx.x % 128 >= 96) {
    cukit::wgmma_wait<1>(sums);
  } else {
    cukit::wgmma_wait<0>(sums);
  }
  store(out, sums);
}

CUKIT_DEVICE void descriptors_differ(unsigned char* tile, float* out, bool planted) {
  Sums sums;
  const unsigned char* mine = planted && threadIdx.x % 128 >= 96 ? tile + 256 : tile;
  cukit::wgmma_fence();
  multiply(sums, tile, 0, kSteps - 1);
  multiply(sums, mine, kSteps - 1, kSteps);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// If planted, the kernel (below) calls this in 128 threads that are not a warpgroup: warps 3 to 6.
CUKIT_DEVICE void misplaced_warpgroup(unsigned char* tile, float* out, bool) {
  Sums sums;
  cukit::wgmma_fence();
  multiply(sums, tile);
  cukit::wgmma_commit();
  cukit::wgmma_wait<0>(sums);
  store(out, sums);
}

// If planted, the kernel (below) writes the tile without fence_proxy_async.
CUKIT_DEVICE void missing_proxy_fence(unsigned char* tile, float* out, bool) {
  misplaced_warpgroup(tile, out, false);
}

}  // namespace

#define BUGS(X) \
  X(accumulators_read_in_flight) \
  X(accumulators_changed_in_flight) \
  X(operand_a_changed_in_flight) \
  X(operand_a_read_in_flight) \
  X(missing_commit) \
  X(commit_too_early) \
  X(lax_wait) \
  X(lax_wait_for_an_operand) \
  X(missing_barrier_after_the_wait) \
  X(exit_in_flight) \
  X(missing_first_fence) \
  X(missing_fence_after_the_accumulators) \
  X(missing_fence_after_a_read) \
  X(missing_fence_after_operand_a) \
  X(missing_fence_between_shapes) \
  X(accumulators_as_operand_a) \
  X(half_a_warpgroup) \
  X(half_a_warpgroup_waits) \
  X(half_a_warpgroup_polls) \
  X(waits_differ) \
  X(descriptors_differ) \
  X(misplaced_warpgroup) \
  X(missing_proxy_fence)

#define NUMBER(name) k_##name,
enum Bug { BUGS(NUMBER) };
#undef NUMBER

extern "C" __global__ void planted_wgmma(const uint4* x, int bug, int planted, float* out) {
  CUKIT_DYNAMIC_SHARED(unsigned char, tile);
  fetch(tile, x, bug != k_missing_proxy_fence || !planted);
  const int first = bug == k_misplaced_warpgroup && planted ? 96 : kGroup;
  if (threadIdx.x < first || threadIdx.x >= first + 128) return;
  switch (bug) {
#define CASE(name) \
  case k_##name: return name(tile, out, planted);
    BUGS(CASE)
#undef CASE
  }
}
