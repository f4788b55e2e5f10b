// Products of few tokens with a quantised weight: x [tokens, k] times W [rows, k] of int4 or int8 codes.
//
//   out[m, n] = sum_k x[m, k] scale[n, k / GROUP] (code[n, k] - zero_point[n, k / GROUP]) + bias[n]
//
// Up to eight tokens are one column tile of mma.sync, and reading the weight is all that takes time.
//
// Mapping: a block has STRIPS * 16 rows and all of k, which its warps share: warp w has the steps of 128
//   columns w, w + WARPS, ... Each lane copies the codes that it will decode by cp.async, STAGES steps
//   ahead, and reads them from where it put them: nobody waits for anybody. In the end the warps' sums
//   are added up in shared memory, in the order of the warps.
// Shared memory, bytes: WARPS * max(STAGES * STRIPS * 16 * 128 * BITS / 8, STRIPS * 512), dynamic: stages
//   of codes of each warp, then the warps' sums.
// Macros: those of gemm/weight_only.cuh, FLOAT8 0, TOKENS 8, CONSUMERS 1; STRIPS 1|2; STAGES 2..;
//   THREADS 32 * WARPS; BLOCKS: of an SM.
// Architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/platform.cuh"
#include "common/ptx/cache_policy.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_only.cuh"

namespace {

constexpr int kWarps = THREADS / cukit::kWarpSize;
constexpr int kSteps = cukit::kBlockColumns / 16;   // of mma.sync in a block of the weight
constexpr int kChunkWords = kSteps * Codes::kWords;  // of a lane
constexpr int kGroups = GROUP ? Weight::kGroups : 1;

constexpr int kChunks16 = kChunkWords / 4;           // 16-byte chunks of a lane in 16 rows
constexpr int kStageBytes = STRIPS * kChunks16 * 16 * cukit::kWarpSize;  // of a warp

// What a lane holds of a step, beside the codes.
struct Factors {
  cukit::Vec<Scale, 2> scales[STRIPS][kGroups];
  unsigned char zeros[STRIPS][kGroups];
  unsigned x[kSteps][2];
};

// A step of a warp: 128 columns of the rows of a unit, STRIPS * 16 rows.
struct Position {
  int unit, step;

  CUKIT_DEVICE void advance(int steps) {
    step += kWarps;
    if (step >= steps) {
      step = threadIdx.x / cukit::kWarpSize;
      unit += gridDim.x;
    }
  }
};

struct Source {
  const unsigned char* weight;
  const T* x;  // the lane's token, from the lane's first column on; null: no such token
  int columns, steps, units;
  unsigned long long policy;

  CUKIT_DEVICE const unsigned char* at(const Position& p) const {
    const int row_block = p.unit * (STRIPS * 16) / cukit::kBlockRows;
    return weight + ((row_block / 2 * static_cast<long long>(steps) + p.step) * 2 + row_block % 2) * Weight::kBytes;
  }
  // Which of the 128 threads that share a block this lane stands for.
  CUKIT_DEVICE int thread(const Position& p, int i) const {
    return ((p.unit * STRIPS + i) % 4) * cukit::kWarpSize + threadIdx.x % cukit::kWarpSize;
  }

  // Starts the copy of a step's codes, a group of cp.async; of none behind the last step.
  CUKIT_DEVICE void copy(unsigned stage, const Position& p) const {
    if (p.unit < units) {
#pragma unroll
      for (int i = 0; i < STRIPS; ++i)
#pragma unroll
        for (int chunk = 0; chunk < kChunks16; ++chunk) {
          cukit::cp_async_16_policy(stage + (i * kChunks16 + chunk) * 16 * cukit::kWarpSize,
                                    at(p) + (chunk * 128 + thread(p, i)) * 16, policy);
        }
    }
    cukit::cp_async_commit();
  }

  CUKIT_DEVICE void load(Factors& to, const Position& p) const {
    if (p.unit >= units) return;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (GROUP != 0) {
          to.scales[i][group] = Weight::scale_pair(at(p), group, thread(p, i));
        }
        to.zeros[i][group] = Weight::zero_points(at(p), group, thread(p, i));
      }
    const int column = p.step * cukit::kBlockColumns;
    const int left = x == nullptr ? 0 : columns - column;
    const unsigned* const pairs = reinterpret_cast<const unsigned*>(x + column);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        to.x[i][j] = 16 * i + 8 * j < left ? pairs[8 * i + 4 * j] : 0u;
      }
  }
};

using StripSums = float[STRIPS][4];

CUKIT_DEVICE void multiply(StripSums& sums, const unsigned char* stage, const Factors& factors) {
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
    unsigned words[kChunkWords];
#pragma unroll
    for (int chunk = 0; chunk < kChunks16; ++chunk) {
      const uint4 four = reinterpret_cast<const uint4*>(stage)[(strip * kChunks16 + chunk) * 32];
      words[4 * chunk] = four.x;
      words[4 * chunk + 1] = four.y;
      words[4 * chunk + 2] = four.z;
      words[4 * chunk + 3] = four.w;
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float products[4] = {};
      const Codes::Zeros zeros = Weight::zeros(factors.zeros[strip][group], nullptr);
#pragma unroll
      for (int i = group * (kSteps / kGroups); i < (group + 1) * (kSteps / kGroups); ++i) {
        unsigned a[4];
        Codes::decode(a, &words[i * Codes::kWords], zeros);
        cukit::mma_16x8x16<T>(GROUP ? products : sums[strip], a, factors.x[i][0], factors.x[i][1]);
      }
      if constexpr (GROUP != 0) {
        float scale[2];
        cukit::to_floats(scale, factors.scales[strip][group]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[strip][i] += scale[i / 2] * products[i];
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) weight_only_ahead(
    const T* __restrict__ x,                   // [tokens, columns]
    const unsigned char* __restrict__ weight,  // [ceil(rows / 128)][steps][2][block bytes]
    const Scale* __restrict__ scales,          // GROUP 0: [rows]
    const T* __restrict__ bias,                // [rows] or null
    T* __restrict__ out,                       // [tokens, rows]
    const cukit::WeightOnlyParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int kRows = STRIPS * 16;
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int token = lane / 4;
  const Source source{
      weight,
      token < p.tokens ? x + static_cast<long long>(token) * p.columns + lane % 4 * 2 : nullptr,
      p.columns,
      p.steps,
      (p.rows + kRows - 1) / kRows,
      cukit::create_policy_evict_first(),
  };

  const unsigned char* const stages = shared + warp * STAGES * kStageBytes + lane * 16;
  float4* const shares = reinterpret_cast<float4*>(shared + kWarps * STAGES * kStageBytes);
  // A warp without a step of its own copies and loads nothing.
  const Position begin{warp < p.steps ? static_cast<int>(blockIdx.x) : source.units, warp};
  Position copied = begin, loaded = begin;
#pragma unroll
  for (int ahead = 0; ahead < STAGES; ++ahead) {
    source.copy(cukit::shared_address(stages + ahead * kStageBytes), copied);
    copied.advance(p.steps);
  }
  Factors next;
  source.load(next, loaded);
  int index = 0, turn = 0;
  for (int unit = blockIdx.x; unit < source.units; unit += gridDim.x, ++turn) {
    StripSums sums = {};
    for (int step = warp; step < p.steps; step += kWarps) {
      const unsigned char* const stage = stages + index * kStageBytes;
      const Factors now = next;
      loaded.advance(p.steps);
      source.load(next, loaded);
      cukit::cp_async_wait<STAGES - 1>();
      multiply(sums, stage, now);
      source.copy(cukit::shared_address(stage), copied);
      copied.advance(p.steps);
      index = index + 1 == STAGES ? 0 : index + 1;
    }
    float4* const shared_sums = shares + turn % 2 * (kWarps * STRIPS * cukit::kWarpSize);
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      shared_sums[(warp * STRIPS + i) * cukit::kWarpSize + lane] =
          make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
    __syncthreads();
    const int first_row = unit * kRows;
    for (int index = threadIdx.x; index < kRows * TOKENS; index += THREADS) {
      const int of_lane = index % 4;
      const int row = first_row + index / 128 * 16 + index % 128 / 16 + of_lane / 2 * 8;
      const int column = index / 4 % 4 * 2 + of_lane % 2;
      if (row < p.rows && column < p.tokens) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
          sum += reinterpret_cast<const float*>(shared_sums)[i * kRows * TOKENS + index];
        }
        if (!GROUP) sum *= cukit::to_float(scales[row]);
        if (bias) sum += cukit::to_float(bias[row]);
        out[static_cast<long long>(column) * p.rows + row] = cukit::from_float<T>(sum);
      }
    }
  }
}
