// Dense matrix product on Hopper's own units: the copy engine (TMA) feeds wgmma through a ring of
// tiles in shared memory.
//
//   out = a b^T
//
// Mapping: a block computes TILE_M x TILE_N = 128 x 128 of the result. One warp of the first warpgroup
//   asks for the tiles of a and b, STAGES steps of TILE_K ahead; each of the other two warpgroups
//   multiplies 64 rows. `full` barriers say that a step's tiles have come, `empty` ones that both
//   warpgroups are through with them. The result leaves through shared memory, by the copy engine.
// Shared memory, bytes: STAGES * 128 * TILE_K * 2 * 2 + 128 * 128 * 2, dynamic: a stages | b stages |
//   out, all in rows of 128 bytes, swizzled. Static: two barriers a stage.
// Macros: DTYPE float16|bfloat16; STAGES 2..; THREADS 384.
// The tensor maps have boxes of 128 x 64 (a, b) and 64 x 64 (out), swizzled by 128 bytes; they read
// zeros outside their tensors and write nothing there. Architecture: sm_90 (sm_90a) only.
// Accumulates in float in a fixed order: deterministic. Reference: cukit/reference/gemm.py.
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kTileK = 64;  // 128 bytes: a row of the swizzle
constexpr int kGroupRows = 64;
constexpr int kGroupThreads = 128;
constexpr int kConsumerWarps = 8;
constexpr int kRowBytes = kTileK * sizeof(T);
constexpr int kTileBytes = kTileM * kRowBytes;            // of a, and of b
constexpr int kBoxBytes = kGroupRows * kRowBytes;         // 64 x 64 elements of out
constexpr int kStepBytes = 32;                            // of k, in one wgmma
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

static_assert(THREADS == 3 * kGroupThreads, "a producer and two consumers");
static_assert(kTileM == kTileN, "both operands have tiles of one size");

struct Ring {
  cukit::Mbarrier full[STAGES];
  cukit::Mbarrier empty[STAGES];
};

namespace producer {

CUKIT_DEVICE void load(Ring& ring, unsigned char* a_tiles, unsigned char* b_tiles,
                       const cukit::TensorMap* a, const cukit::TensorMap* b, int m, int n,
                       int steps) {
  for (int step = 0; step < steps; ++step) {
    const int stage = step % STAGES;
    const int round = step / STAGES;
    cukit::mbarrier_wait(&ring.empty[stage], (round & 1) ^ 1);
    cukit::mbarrier_arrive_expect(&ring.full[stage], 2 * kTileBytes);
    cukit::tma_load_2d(a_tiles + stage * kTileBytes, a, &ring.full[stage], step * kTileK, m);
    cukit::tma_load_2d(b_tiles + stage * kTileBytes, b, &ring.full[stage], step * kTileK, n);
  }
}

}  // namespace producer

namespace consumer {

CUKIT_DEVICE unsigned long long descriptor(const unsigned char* tile) {
  return cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 8 * kRowBytes);
}

// One product stays in flight while the next step's tiles are waited for.
CUKIT_DEVICE void multiply(Ring& ring, float (&acc)[kTileN / 2], const unsigned char* a_tiles,
                           const unsigned char* b_tiles, int steps) {
  const bool reports = threadIdx.x % cukit::kWarpSize == 0;
  for (int step = 0; step < steps; ++step) {
    const int stage = step % STAGES;
    cukit::mbarrier_wait(&ring.full[stage], (step / STAGES) & 1);
    cukit::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRowBytes; k += kStepBytes) {
      cukit::wgmma<T, kTileN>(acc, descriptor(a_tiles + stage * kTileBytes + k),
                              descriptor(b_tiles + stage * kTileBytes + k), step > 0 || k > 0);
    }
    cukit::wgmma_commit();
    cukit::wgmma_wait<1>(acc);
    if (step > 0 && reports) cukit::mbarrier_arrive(&ring.empty[(step - 1) % STAGES]);
  }
  cukit::wgmma_wait<0>(acc);
}

// The warpgroup's 64 x 128 results: two boxes of 64 x 64 elements in rows of 128 swizzled bytes.
CUKIT_DEVICE void store(const float (&acc)[kTileN / 2], unsigned char* boxes,
                        const cukit::TensorMap* out, int m, int n, int group) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x % kGroupThreads / cukit::kWarpSize;
  const int row = 16 * warp + lane % 16;
  const unsigned row_address = cukit::shared_address(boxes) + row * kRowBytes;
#pragma unroll
  for (int pair = 0; pair < kTileN / 16; ++pair) {
    const float* d = &acc[8 * pair];
    const unsigned packed[4] = {cukit::pack<T>(d[0], d[1]), cukit::pack<T>(d[2], d[3]),
                                cukit::pack<T>(d[4], d[5]), cukit::pack<T>(d[6], d[7])};
    const int chunk = pair % 4 * 2 + lane / 16;
    cukit::stmatrix_x4(row_address + pair / 4 * kBoxBytes + ((chunk ^ row % 8) << 4), packed);
  }
  cukit::fence_proxy_async();
  cukit::named_sync(1 + group, kGroupThreads);
  if (threadIdx.x % kGroupThreads == 0) {
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      cukit::tma_store_2d(out, boxes + box * kBoxBytes, n + box * kTileK, m);
    }
    cukit::bulk_commit();
    cukit::bulk_wait_read<0>();
  }
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_tma_sm90(
    const __grid_constant__ cukit::TensorMap a,    // [m, k]
    const __grid_constant__ cukit::TensorMap b,    // [n, k]
    const __grid_constant__ cukit::TensorMap out,  // [m, n]
    int steps) {                                   // ceil(k / TILE_K), at least 1
  __shared__ Ring ring;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const a_tiles = shared;
  unsigned char* const b_tiles = a_tiles + STAGES * kTileBytes;
  unsigned char* const out_boxes = b_tiles + STAGES * kTileBytes;
  const int m = blockIdx.y * kTileM;
  const int n = blockIdx.x * kTileN;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      cukit::mbarrier_init(&ring.full[stage], 1);
      cukit::mbarrier_init(&ring.empty[stage], kConsumerWarps);
    }
    cukit::fence_mbarrier_init();
  }
  __syncthreads();

  if (group < 0) {
    cukit::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) producer::load(ring, a_tiles, b_tiles, &a, &b, m, n, steps);
  } else {
    cukit::take_registers<kConsumerRegisters>();
    float acc[kTileN / 2];
    consumer::multiply(ring, acc, a_tiles + group * kBoxBytes, b_tiles, steps);
    consumer::store(acc, out_boxes + group * 2 * kBoxBytes, &out, m + group * kGroupRows, n, group);
  }
}
