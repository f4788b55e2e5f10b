// The product of few tokens with a weight matrix, memory-bound: the weights are read once.
//   out[t, n] = sum_k x[t, k] * w[k, n]     for at most TOKENS tokens
//
// Mapping: a thread block computes a strip of columns n; its warps, and the blocks of its cluster,
//   divide the steps of k. A warp multiplies with mma.m16n8k16: x is operand a, w is operand b. The
//   order of k within a sum is free as long as both operands agree, so the 16 bytes of w that a
//   thread loads are its fragments of operand b, without shuffles.
//     MAJOR 0, w contiguous along k: 8 * TILES columns per block, 32 of k per step; thread (g, t) =
//       (lane / 4, lane % 4) holds k = 8t ... 8t + 7 of column g of each tile, enough for two MMAs.
//     MAJOR 1, w contiguous along n: 64 columns per block, 16 of k per step; the thread holds
//       columns 8g ... 8g + 7 of rows 4t ... 4t + 3 and packs pairs of rows. MMA i uses column
//       8g + i.
//   Each warp has a cp.async pipeline in which every thread reads only the data that it copied
//   itself: many loads are in flight without barriers and without registers.
// Shared memory: the stages, STAGES * WARPS * 512 bytes for each load of w and each 8 TOKENS,
//   reused for the warps' accumulators, 4 * WARPS * TOKENS * columns bytes; static 4 * TOKENS *
//   columns for the cluster.
// Macros: DTYPE float16|bfloat16; OUT float32|float16|bfloat16; MAJOR; TOKENS 8|16; TILES (1 with
//   MAJOR 1); STAGES; WARPS; CLUSTER 1, 2, 4 or 8, above 1 from sm_90 on; ALIGNED 0|1: rows of w
//   are 16-byte aligned and their length is a multiple of 8, and the same holds for x, contiguous
//   along k. With 0, elements are loaded one by one, without a pipeline.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic. Reference:
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
constexpr int kStep = kAlongN ? 16 : 32;       // k per step
constexpr int kProducts = kAlongN ? 8 : TILES; // tiles of 8 columns
constexpr int kColumns = 8 * kProducts;        // per block
constexpr int kLoads = kAlongN ? 4 : TILES;    // loads of w per step
constexpr int kHalves = TOKENS / 8;            // groups of 8 rows of a
constexpr int kDepth = kStep / 4;              // k per thread and step
constexpr int kPieces = kLoads + kHalves;      // 16-byte pieces per thread and stage
constexpr int kResults = TOKENS * kColumns;
constexpr int kOwned = kResults / CLUSTER;     // results that a block of the cluster finishes

// Eight values in four registers.
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

// A thread's part of a step: pieces of w, then pieces of x.
struct Step {
  Vector pieces[kPieces];

  Step() = default;

  // Reads a stage. A piece of x has only kDepth values.
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

  CUKIT_DEVICE void multiply(float (&acc)[kProducts][4]) const {
    const Vector& low = pieces[kLoads];
    const Vector& high = pieces[kPieces - 1];  // tokens 8 ... 15
#pragma unroll
    for (int p = 0; p < kDepth / 2; p += 2) {  // two pairs of k per MMA
      const unsigned a[4] = {low.pairs[p], kHalves > 1 ? high.pairs[p] : 0, low.pairs[p + 1],
                             kHalves > 1 ? high.pairs[p + 1] : 0};
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        if constexpr (kAlongN) {
          // Column i is the lower or upper half of a register in each of two rows.
          const unsigned halves = i % 2 == 0 ? 0x5410 : 0x7632;
          const int pair = i / 2;
          mma_16x8x16<T>(acc[i], a,
                         __byte_perm(pieces[0].pairs[pair], pieces[1].pairs[pair], halves),
                         __byte_perm(pieces[2].pairs[pair], pieces[3].pairs[pair], halves));
        } else {
          mma_16x8x16<T>(acc[i], a, pieces[i].pairs[p], pieces[i].pairs[p + 1]);
        }
      }
    }
  }
};

// This thread's pointers into the operands.
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
        // Columns beyond the last one reload it; their results are dropped.
        const long long n = min(column + 8 * i + g, at.columns - 1);
        w_[i] = w + n * at.w_leading + first_;
      }
    }
  }

  // Copies this thread's pieces of the step at k; zero-fills beyond the depth.
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

  // Loads the same pieces to registers, one element at a time.
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

// The index of accumulator i of an MMA in the block's results [TOKENS, kColumns].
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
  // Stages [WARPS][STAGES][kPieces][32], then accumulators float [WARPS][kResults].
  CUKIT_DYNAMIC_SHARED(Vector, stages);
  __shared__ float gathered[CLUSTER][kOwned];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  int rank = 0;
  if constexpr (CLUSTER > 1) {
    rank = cluster_rank();
    cluster_arrive();  // peers may write to this block's shared memory once it has started
  }
  const int column = static_cast<int>(blockIdx.x / CLUSTER) * kColumns;
  const Operands operands(x, w, at, column, lane);

  float acc[kProducts][4] = {};
  constexpr int kStride = kStep * WARPS * CLUSTER;  // between consecutive steps of a warp
  const int first = (rank * WARPS + warp) * kStep;
  if constexpr (ALIGNED) {
    constexpr int kStageVectors = kPieces * kWarpSize;
    const Vector* own = stages + warp * STAGES * kStageVectors + lane;
    int ahead = first;  // k of the next copy
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
      step.multiply(acc);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the stages are reused for the accumulators
  } else {
    for (int k = first; k < at.depth; k += kStride) {
      Step step;
      operands.load(step, k);
      step.multiply(acc);
    }
  }

  float* partial = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kHalves; ++j) {
      partial[warp * kResults + place_of(i, j, lane)] = acc[i][j];
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
