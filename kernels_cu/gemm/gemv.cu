// The product of few tokens with a matrix of weights, for which reading the weights is all the work:
//   out[t, n] = sum_k x[t, k] * w[k, n]     for at most TOKENS tokens
//
// Mapping: a thread block computes a strip of columns n; its warps, and the blocks of its cluster,
//   share the depth k step by step. A warp multiplies with mma.m16n8k16: x is the operand a, w the
//   operand b. A sum over k may run in any order as long as both operands follow the same: threads
//   load 16 bytes of w at a time and multiply them as they stand, without a shuffle.
//     MAJOR 0, w contiguous along k: 8 * TILES columns a block, 32 of k a step; thread (g, t) =
//       (lane / 4, lane % 4) holds k = 8t ... 8t + 7 of column g of each tile, which are two products.
//     MAJOR 1, w contiguous along n: 64 columns a block, 16 of k a step; the thread holds columns 8g ...
//       8g + 7 of rows 4t ... 4t + 3, and joins two rows to pairs. Product i takes column 8g + i.
//   Steps wait in a ring in shared memory, where each thread reads back what it copied itself: many
//   loads are in flight without a barrier, and without a register for any of them.
// Shared memory: the ring, STAGES * WARPS * 512 bytes for each load of w and each 8 TOKENS, later the
//   sums of the warps, 4 * WARPS * TOKENS * columns bytes; static 4 * TOKENS * columns for the cluster.
// Macros: DTYPE float16|bfloat16; OUT float32|float16|bfloat16; MAJOR; TOKENS 8|16; TILES (1 where
//   MAJOR is 1); STAGES; WARPS; CLUSTER 1, 2, 4 or 8, above 1 from sm_90 on; ALIGNED 0|1: rows of w begin
//   on 16 bytes and their length is a multiple of 8, and so it is with x, contiguous along k. Without,
//   elements are loaded one by one and there is no ring.
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
constexpr int kStep = kAlongN ? 16 : 32;       // of k
constexpr int kProducts = kAlongN ? 8 : TILES; // tiles of 8 columns
constexpr int kColumns = 8 * kProducts;        // of a block
constexpr int kLoads = kAlongN ? 4 : TILES;    // of w, a step
constexpr int kHalves = TOKENS / 8;            // of the rows of a
constexpr int kDepth = kStep / 4;              // of k that a thread multiplies, a step
constexpr int kPieces = kLoads + kHalves;      // of 16 bytes, of a thread in a stage
constexpr int kResults = TOKENS * kColumns;
constexpr int kOwned = kResults / CLUSTER;     // results that a block of the cluster finishes

// Eight values as four registers.
struct alignas(16) Vector {
  unsigned pairs[4];
};

// The first `count` of 8 values `stride` apart, 0 beyond.
CUKIT_DEVICE Vector load_some(const T* values, int count, long long stride) {
  Vec<T, kVector> vector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    vector[i] = i < count ? values[i * stride] : from_float<T>(0.0f);
  }
  return *reinterpret_cast<const Vector*>(&vector);
}

// What one thread holds of a step: the pieces of w, then those of x.
struct Step {
  Vector pieces[kPieces];

  Step() = default;

  // From a stage of the ring. Of x there are only kDepth values.
  CUKIT_DEVICE explicit Step(const Vector* stage) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i < kLoads || kDepth == kVector) {
        pieces[i] = stage[i * kWarpSize];
      } else {
        const uint2 half = *reinterpret_cast<const uint2*>(stage + i * kWarpSize);
        pieces[i] = {{half.x, half.y, 0, 0}};
      }
    }
  }

  CUKIT_DEVICE void multiply(float (&sums)[kProducts][4]) const {
    const Vector& low = pieces[kLoads];
    const Vector& high = pieces[kPieces - 1];  // of tokens 8 ... 15
#pragma unroll
    for (int p = 0; p < kDepth / 2; p += 2) {  // two pairs of k a product
      const unsigned a[4] = {low.pairs[p], kHalves > 1 ? high.pairs[p] : 0, low.pairs[p + 1],
                             kHalves > 1 ? high.pairs[p + 1] : 0};
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        if constexpr (kAlongN) {
          // Column i: the lower or the upper half of a register of two rows.
          const unsigned halves = i % 2 == 0 ? 0x5410 : 0x7632;
          const int pair = i / 2;
          mma_16x8x16<T>(sums[i], a,
                         __byte_perm(pieces[0].pairs[pair], pieces[1].pairs[pair], halves),
                         __byte_perm(pieces[2].pairs[pair], pieces[3].pairs[pair], halves));
        } else {
          mma_16x8x16<T>(sums[i], a, pieces[i].pairs[p], pieces[i].pairs[p + 1]);
        }
      }
    }
  }
};

// The operands as one thread sees them.
class Operands {
 public:
  CUKIT_DEVICE Operands(const T* x, const T* w, const GemvParameters& at, int column, int lane)
      : first_(lane % 4 * kDepth), depth_(at.depth), x_depth_(at.x_depth) {
    const int g = lane / 4;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int token = g + 8 * h;
      has_token_[h] = token < at.tokens;
      x_[h] = x + token * at.x_token + first_ * at.x_depth;
    }
    if constexpr (kAlongN) {
      const int n = column + kVector * g;
      columns_ = at.columns - n;
      w_[0] = w + first_ * at.w_leading + n;
      w_step_ = at.w_leading;
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        // Columns beyond the last repeat it; their results are dropped.
        const long long n = min(column + 8 * i + g, at.columns - 1);
        w_[i] = w + n * at.w_leading + first_;
      }
    }
  }

  // Copies this thread's pieces of the step from k on; zeros beyond the depth.
  CUKIT_DEVICE void copy(unsigned slot, int k) const {
    constexpr int kPieceBytes = 16 * kWarpSize;
    const int left = depth_ - first_ - k;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      cp_async_16(slot + i * kPieceBytes, w_at(i, k), kAlongN ? i < left && columns_ > 0 : left > 0);
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      cp_async_cached<2 * kDepth>(slot + (kLoads + h) * kPieceBytes, x_[h] + k,
                                  has_token_[h] && left > 0);
    }
    cp_async_commit();
  }

  // The same into registers, one element at a time.
  CUKIT_DEVICE void load(Step& step, int k) const {
    const int left = depth_ - first_ - k;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      step.pieces[i] = load_some(w_at(i, k), kAlongN ? (i < left ? columns_ : 0) : left, 1);
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int count = has_token_[h] ? min(left, kDepth) : 0;
      step.pieces[kLoads + h] = load_some(x_[h] + k * x_depth_, count, x_depth_);
    }
  }

 private:
  CUKIT_DEVICE const T* w_at(int i, int k) const {
    return kAlongN ? w_[0] + (k + i) * w_step_ : w_[kAlongN ? 0 : i] + k;
  }

  const T* x_[kHalves];
  const T* w_[kAlongN ? 1 : kLoads];
  bool has_token_[kHalves];
  int first_, depth_, columns_ = 0;
  long long x_depth_, w_step_ = 0;
};

// Where the i-th sum of a product of this thread belongs: token, and column of the block.
CUKIT_DEVICE int place_of(int product, int i, int lane) {
  const int token = lane / 4 + i / 2 * 8;
  const int of_product = lane % 4 * 2 + i % 2;
  const int column = kAlongN ? kVector * of_product + product : 8 * product + of_product;
  return token * kColumns + column;
}

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(WARPS * 32) gemv(
    const T* __restrict__ x,  // [tokens, depth], any strides
    const T* __restrict__ w,  // MAJOR 0: [columns, depth]; MAJOR 1: [depth, columns]
    OUT* __restrict__ out,    // [tokens, columns], any strides
    const __grid_constant__ GemvParameters at) {
  CUKIT_DYNAMIC_SHARED(Vector, ring);  // [WARPS][STAGES][kPieces][32]; then float [WARPS][kResults]
  __shared__ float gathered[CLUSTER][kOwned];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  int rank = 0;
  if constexpr (CLUSTER > 1) {
    rank = cluster_rank();
    cluster_arrive();  // peers may write to this block's memory once it has started
  }
  const int column = static_cast<int>(blockIdx.x / CLUSTER) * kColumns;
  const Operands operands(x, w, at, column, lane);

  float sums[kProducts][4] = {};
  constexpr int kStride = kStep * WARPS * CLUSTER;  // between two steps of a warp
  const int first = (rank * WARPS + warp) * kStep;
  if constexpr (ALIGNED) {
    constexpr int kStageVectors = kPieces * kWarpSize;
    const Vector* own = ring + warp * STAGES * kStageVectors + lane;
    int ahead = first;  // of the next copy
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s, ahead += kStride) {
      operands.copy(shared_address(own + s * kStageVectors), ahead);
    }
    int stage = 0;
    for (int k = first; k < at.depth; k += kStride, ahead += kStride) {
      cp_async_wait<STAGES - 2>();
      const Step step(own + stage * kStageVectors);
      const int freed = stage == 0 ? STAGES - 1 : stage - 1;
      operands.copy(shared_address(own + freed * kStageVectors), ahead);
      step.multiply(sums);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring becomes the warps' sums
  } else {
    for (int k = first; k < at.depth; k += kStride) {
      Step step;
      operands.load(step, k);
      step.multiply(sums);
    }
  }

  float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kHalves; ++j) {
      partial[warp * kResults + place_of(i, j, lane)] = sums[i][j];
    }
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_wait();
  for (int i = threadIdx.x; i < kResults; i += WARPS * kWarpSize) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < WARPS; ++j) sum += partial[j * kResults + i];
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
  for (int i = threadIdx.x; i < kOwned; i += WARPS * kWarpSize) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < CLUSTER; ++j) sum += gathered[j][i];
    const int result = rank * kOwned + i;
    const int token = result / kColumns, n = column + result % kColumns;
    if (token < at.tokens && n < at.columns) {
      out[token * at.out_token + n * at.out_column] = from_float<OUT>(sum);
    }
  }
}
