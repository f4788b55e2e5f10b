// The product of few tokens with a matrix of weights, for which reading the weights is all the work:
//   out[t, n] = sum_k x[t, k] * w[k, n]     for at most TOKENS tokens
//
// Mapping: a thread block computes a strip of columns n; its warps, and the blocks of its cluster,
//   share the depth k. A warp multiplies with mma.m16n8k16: x is the operand a, w the operand b. A sum
//   over k may run in any order as long as both operands follow the same: threads multiply 16 bytes of
//   w at a time as they stand, without a shuffle.
//     MAJOR 0, w contiguous along k: 16 columns a block. A stage of a warp is 128 of k; the thread
//       (g, t) = (lane / 4, lane % 4) multiplies k = 8t ... 8t + 7 of column g of both tiles of 8.
//     MAJOR 1, w contiguous along n: 256 columns a block, 64 a warp, of which four share a stage of 32
//       of k in halves. The thread multiplies rows 4t ... 4t + 3 of columns 8g ... 8g + 7, joining two
//       rows to pairs; product i takes column 8g + i.
//   Memory is read in runs of at least 256 bytes, which a warp copies to shared memory together: runs of
//   64 and 128 bytes reach half the bandwidth of an H200.
// Shared memory: STAGES stages, kStageBytes each, of the block or of each warp; later the sums of the
//   warps. Static: 4 * TOKENS * columns for the cluster.
// Macros: DTYPE float16|bfloat16; OUT float32|float16|bfloat16; MAJOR; TOKENS 8|16; STAGES; CLUSTER 1,
//   2, 4 or 8, above 1 from sm_90 on; ALIGNED 0|1: rows of w begin on 16 bytes and their length is a
//   multiple of 8, and so it is with x, contiguous along k. Without, elements are loaded one by one.
// Minimum architecture: sm_80. Sums in float in a fixed order: deterministic. Reference:
//   cukit/reference/gemm.py.
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"

namespace {

using namespace cukit;
using T = element_t;

constexpr int kVector = 8;  // values of 16 bytes
constexpr bool kAlongN = MAJOR == 1;
constexpr int kWarps = kAlongN ? 8 : 4;
constexpr int kStep = kAlongN ? 16 : 32;                // of k, of one round of products
constexpr int kProducts = kAlongN ? 8 : 2;              // tiles of 8 columns of a warp
constexpr int kColumns = kAlongN ? 256 : 8 * kProducts; // of a block
constexpr int kWarpColumns = 8 * kProducts;
constexpr int kSlots = kWarps * kWarpColumns / kColumns;  // warps that share the depth
constexpr int kLoads = kAlongN ? 4 : kProducts;         // vectors of w, of a thread and a round
constexpr int kHalves = TOKENS / 8;                     // of the rows of a
constexpr int kDepth = kStep / 4;                       // of k that a thread multiplies in a round
constexpr int kResults = TOKENS * kColumns;
constexpr int kOwned = kResults / CLUSTER;  // results that a block of the cluster finishes

// A stage: rows of w (of one column, or of one k), then rows of x, one for each token.
constexpr int kStageDepth = kAlongN ? 32 : 128;
constexpr int kRowsW = kAlongN ? kStageDepth : kColumns;
constexpr int kRowBytesW = 2 * (kAlongN ? kColumns : kStageDepth);
constexpr int kRowBytesX = 2 * kStageDepth;
constexpr int kBytesW = kRowsW * kRowBytesW;
constexpr int kStageBytes = kBytesW + TOKENS * kRowBytesX;
constexpr int kCopiers = 32 * (kAlongN ? kWarps : 1);  // threads that share a stage

// Eight values as four registers.
struct alignas(16) Vector {
  unsigned pairs[4];
};

// Where a chunk of 16 bytes of a row of w lies: threads that read together (two g, four t) find theirs
// in different banks.
CUKIT_DEVICE int place_in_stage(int row, int chunk) {
  const int swizzled = kAlongN ? chunk ^ (row >> 2 & 3) << 1 : chunk ^ (row & 1) << 2;
  return row * kRowBytesW + 16 * swizzled;
}

// The first `count` of 8 values `stride` apart, 0 beyond.
CUKIT_DEVICE Vector load_some(const T* values, int count, long long stride) {
  Vec<T, kVector> vector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    vector[i] = i < count ? values[i * stride] : from_float<T>(0.0f);
  }
  return *reinterpret_cast<const Vector*>(&vector);
}

// What one thread multiplies in a round. With MAJOR 1 only half of each vector of x is there.
struct Round {
  Vector w[kLoads];
  Vector x[kHalves];

  CUKIT_DEVICE void multiply(float (&sums)[kProducts][4]) const {
#pragma unroll
    for (int p = 0; p < kDepth / 2; p += 2) {  // two pairs of k a product
      const unsigned a[4] = {x[0].pairs[p], kHalves > 1 ? x[kHalves - 1].pairs[p] : 0,
                             x[0].pairs[p + 1], kHalves > 1 ? x[kHalves - 1].pairs[p + 1] : 0};
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        if constexpr (kAlongN) {
          // Column i: the lower or the upper half of a register of two rows.
          const unsigned halves = i % 2 == 0 ? 0x5410 : 0x7632;
          const int pair = i / 2;
          mma_16x8x16<T>(sums[i], a, __byte_perm(w[0].pairs[pair], w[1].pairs[pair], halves),
                         __byte_perm(w[2].pairs[pair], w[3].pairs[pair], halves));
        } else {
          mma_16x8x16<T>(sums[i], a, w[i].pairs[p], w[i].pairs[p + 1]);
        }
      }
    }
  }
};

struct Tensors {
  const T* x;
  const T* w;
  GemvParameters at;
  int column;  // the first of the block

  // Copies the stage from k on; `thread` of kCopiers. Zeros beyond the depth and the columns.
  CUKIT_DEVICE void copy(unsigned stage, int k, int thread) const {
    constexpr int kChunksW = kRowBytesW / 16, kChunksX = kRowBytesX / 16;
#pragma unroll
    for (int i = thread; i < kRowsW * kChunksW; i += kCopiers) {
      const int row = i / kChunksW, chunk = i % kChunksW;
      const int n = column + (kAlongN ? kVector * chunk : row);
      const int depth = k + (kAlongN ? row : kVector * chunk);
      const bool exists = n < at.columns && depth < at.depth;
      const long long index = kAlongN ? depth * at.w_leading + n : n * at.w_leading + depth;
      cp_async_16(stage + place_in_stage(row, chunk), exists ? w + index : w, exists);
    }
    // Rows of absent tokens stay zeros, as the block made them.
    for (int i = thread; i < at.tokens * kChunksX; i += kCopiers) {
      const int token = i / kChunksX, chunk = i % kChunksX;
      const int depth = k + kVector * chunk;
      const bool exists = depth < at.depth;
      cp_async_cached<16>(stage + kBytesW + token * kRowBytesX + 16 * chunk,
                          exists ? x + token * at.x_token + depth : x, exists);
    }
  }

  // The same for one round, into registers and one element at a time. `within`: the first column of
  // the warp in the block.
  CUKIT_DEVICE void load(Round& round, int k, int within, int lane) const {
    const int g = lane / 4, first = k + lane % 4 * kDepth;
    const int left = at.depth - first;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if constexpr (kAlongN) {
        const int n = column + within + kVector * g;
        round.w[i] = load_some(w + (first + i) * at.w_leading + n,
                               i < left ? at.columns - n : 0, 1);
      } else {
        // Columns beyond the last repeat it; their results are dropped.
        const long long n = min(column + 8 * i + g, at.columns - 1);
        round.w[i] = load_some(w + n * at.w_leading + first, left, 1);
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int token = g + 8 * h;
      round.x[h] = load_some(x + token * at.x_token + first * at.x_depth,
                             token < at.tokens ? min(left, kDepth) : 0, at.x_depth);
    }
  }
};

// Round `r` of a stage, of the columns from `within` on.
CUKIT_DEVICE Round read(const unsigned char* stage, int r, int within, int lane) {
  const int g = lane / 4, t = lane % 4;
  Round round;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int row = kAlongN ? r * kStep + 4 * t + i : 8 * i + g;
    const int chunk = kAlongN ? within / kVector + g : r * (kStep / kVector) + t;
    round.w[i] = *reinterpret_cast<const Vector*>(stage + place_in_stage(row, chunk));
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const unsigned char* from =
        stage + kBytesW + (g + 8 * h) * kRowBytesX + 2 * (r * kStep + t * kDepth);
    if constexpr (kDepth == kVector) {
      round.x[h] = *reinterpret_cast<const Vector*>(from);
    } else {
      const uint2 half = *reinterpret_cast<const uint2*>(from);
      round.x[h] = {{half.x, half.y, 0, 0}};
    }
  }
  return round;
}

// Threads that share a stage wait for each other.
CUKIT_DEVICE void sync_copiers() {
  if constexpr (kAlongN) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// Where the i-th sum of a product of this thread belongs: token, and column of the block.
CUKIT_DEVICE int place_of(int product, int i, int within, int lane) {
  const int token = lane / 4 + i / 2 * 8;
  const int of_product = lane % 4 * 2 + i % 2;
  const int column = kAlongN ? kVector * of_product + product : 8 * product + of_product;
  return token * kColumns + within + column;
}

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(kWarps * 32) gemv(
    const T* __restrict__ x,  // [tokens, depth], any strides
    const T* __restrict__ w,  // MAJOR 0: [columns, depth]; MAJOR 1: [depth, columns]
    OUT* __restrict__ out,    // [tokens, columns], any strides
    const __grid_constant__ GemvParameters at) {
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);  // later float [kSlots][kResults]
  __shared__ float gathered[CLUSTER][kOwned];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int within = kAlongN ? warp % (kColumns / kWarpColumns) * kWarpColumns : 0;
  const int slot = kAlongN ? warp / (kColumns / kWarpColumns) : warp;
  int rank = 0;
  if constexpr (CLUSTER > 1) {
    rank = cluster_rank();
    cluster_arrive();  // peers may write to this block's memory once it has started
  }
  const Tensors tensors = {x, w, at, static_cast<int>(blockIdx.x / CLUSTER) * kColumns};

  float sums[kProducts][4] = {};
  if constexpr (ALIGNED) {
    constexpr int kRounds = kStageDepth / kStep;
    const int sharers = kAlongN ? CLUSTER : kWarps * CLUSTER;  // of the depth, by whole stages
    const int first = (kAlongN ? rank : rank * kWarps + warp) * kStageDepth;
    const int stride = sharers * kStageDepth;
    const int thread = kAlongN ? threadIdx.x : lane;
    unsigned char* own = stages + (kAlongN ? 0 : warp * STAGES * kStageBytes);
    for (int i = thread; i < STAGES * TOKENS * kRowBytesX / 16; i += kCopiers) {
      const int stage = i / (TOKENS * kRowBytesX / 16), part = i % (TOKENS * kRowBytesX / 16);
      if (part >= at.tokens * kRowBytesX / 16) {
        *reinterpret_cast<uint4*>(own + stage * kStageBytes + kBytesW + 16 * part) = uint4{};
      }
    }
    int ahead = first;  // of the next copy
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s, ahead += stride) {
      if (ahead < at.depth) tensors.copy(shared_address(own + s * kStageBytes), ahead, thread);
      cp_async_commit();
    }
    int stage = 0;
    for (int k = first; k < at.depth; k += stride, ahead += stride) {
      cp_async_wait<STAGES - 2>();
      sync_copiers();  // also behind the last read of the stage that is filled next
      const int freed = stage == 0 ? STAGES - 1 : stage - 1;
      if (ahead < at.depth) tensors.copy(shared_address(own + freed * kStageBytes), ahead, thread);
      cp_async_commit();
      const unsigned char* filled = own + stage * kStageBytes;
      if constexpr (kAlongN) {
        read(filled, slot, within, lane).multiply(sums);
      } else {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) read(filled, r, within, lane).multiply(sums);
      }
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    __syncthreads();  // the stages become the warps' sums
  } else {
    for (int k = (rank * kSlots + slot) * kStep; k < at.depth; k += kStep * kSlots * CLUSTER) {
      Round round;
      tensors.load(round, k, within, lane);
      round.multiply(sums);
    }
  }

  float* partial = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kHalves; ++j) {
      partial[slot * kResults + place_of(i, j, within, lane)] = sums[i][j];
    }
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_wait();
  for (int i = threadIdx.x; i < kResults; i += kWarps * kWarpSize) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) sum += partial[j * kResults + i];
    if constexpr (CLUSTER > 1) {
      store_remote(&gathered[rank][i % kOwned], i / kOwned, sum);
    } else {
      gathered[0][i] = sum;
    }
  }
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kOwned; i += kWarps * kWarpSize) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < CLUSTER; ++j) sum += gathered[j][i];
    const int result = rank * kOwned + i;
    const int token = result / kColumns, n = tensors.column + result % kColumns;
    if (token < at.tokens && n < at.columns) {
      out[token * at.out_token + n * at.out_column] = from_float<OUT>(sum);
    }
  }
}
