// Products of few tokens with a quantised weight: x [tokens, k] times W [rows, k] of int4 or int8
// codes.
//
//   out[m, n] = sum_k x[m, k] scale[n, k / GROUP] (code[n, k] - zero_point[n, k / GROUP]) + bias[n]
//
// Up to eight tokens fit into one column tile of mma.sync, and the time to read the weight limits
// the kernel. Codes are loaded straight from global memory to registers, without shared memory or
// barriers.
//
// Mapping: a block computes STRIPS * 16 rows over all of k, which its warps divide: warp w computes
//   steps w, w + WARPS, ... of 128 columns. A warp loads a step's codes, scales and x while it
//   multiplies the previous step. At the end the warps' accumulators are added in shared memory, in
//   warp order.
// Shared memory, bytes: WARPS * STRIPS * 512, static.
// Macros: those of gemm/weight_only.cuh, FLOAT8 0, TOKENS 8, CONSUMERS 1; STRIPS 1|2; THREADS 32 *
//   WARPS.
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/platform.cuh"
#include "common/ptx/cache_policy.cuh"
#include "common/ptx/mma.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_only.cuh"

namespace {

constexpr int kWarps = THREADS / cukit::kWarpSize;
constexpr int kSteps = cukit::kBlockColumns / 16;   // mma.sync steps per block of the weight
constexpr int kChunkWords = kSteps * Codes::kWords;  // per lane
constexpr int kGroups = GROUP ? Weight::kGroups : 1;

// A lane's part of a step.
struct Step {
  unsigned words[STRIPS][kChunkWords];
  cukit::Vec<Scale, 2> scales[STRIPS][kGroups];
  unsigned char zeros[STRIPS][kGroups];
  unsigned x[kSteps][2];
};

struct Source {
  const unsigned char* block;  // the packed block that contains this thread block's rows
  const T* x;                  // the lane's token, at the lane's first column; null if none
  int strip;                   // this thread block's first strip, of the packed block's four
  int columns;
  unsigned long long policy;

  CUKIT_DEVICE void load(Step& to, int step) const {
    const unsigned char* const from = block + static_cast<long long>(step) * 2 * Weight::kBytes;
    const int lane = threadIdx.x % cukit::kWarpSize;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      const int thread = (strip + i) * cukit::kWarpSize + lane;
#pragma unroll
      for (int chunk = 0; chunk < kChunkWords / 4; ++chunk) {
        const uint4 four = cukit::load_global_16(
            reinterpret_cast<const uint4*>(from) + chunk * 128 + thread, policy);
        to.words[i][4 * chunk] = four.x;
        to.words[i][4 * chunk + 1] = four.y;
        to.words[i][4 * chunk + 2] = four.z;
        to.words[i][4 * chunk + 3] = four.w;
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (GROUP != 0) {
          to.scales[i][group] = Weight::scale_pair(from, group, thread);
        }
        to.zeros[i][group] = Weight::zero_points(from, group, thread);
      }
    }
    const int column = step * cukit::kBlockColumns;
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

using StripAccumulators = float[STRIPS][4];

CUKIT_DEVICE void multiply(StripAccumulators& acc, const Step& step) {
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float products[4] = {};
      const Codes::Zeros zeros = Weight::zeros(step.zeros[strip][group], nullptr);
#pragma unroll
      for (int i = group * (kSteps / kGroups); i < (group + 1) * (kSteps / kGroups); ++i) {
        unsigned a[4];
        Codes::decode(a, &step.words[strip][i * Codes::kWords], zeros);
        cukit::mma_16x8x16<T>(GROUP ? products : acc[strip], a, step.x[i][0], step.x[i][1]);
      }
      if constexpr (GROUP != 0) {
        float scale[2];
        cukit::to_floats(scale, step.scales[strip][group]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[strip][i] += scale[i / 2] * products[i];
      }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) weight_only_few(
    const T* __restrict__ x,                   // [tokens, columns]
    const unsigned char* __restrict__ weight,  // [ceil(rows / 128)][steps][2][block bytes]
    const Scale* __restrict__ scales,          // GROUP 0: [rows]
    const T* __restrict__ bias,                // [rows] or null
    T* __restrict__ out,                       // [tokens, rows]
    const cukit::WeightOnlyParameters p) {
  __shared__ float4 shares[kWarps][STRIPS][cukit::kWarpSize];
  constexpr int kRows = STRIPS * 16;
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int first_row = blockIdx.x * kRows;
  const long long row_block = first_row / cukit::kBlockRows;
  const int token = lane / 4;
  const Source source{
      weight + (row_block / 2 * p.steps * 2 + row_block % 2) * Weight::kBytes,
      token < p.tokens ? x + static_cast<long long>(token) * p.columns + lane % 4 * 2 : nullptr,
      first_row % cukit::kBlockRows / 16,
      p.columns,
      cukit::create_policy_evict_first(),
  };

  StripAccumulators acc = {};
  Step steps[2];
  if (warp < p.steps) source.load(steps[0], warp);
  for (int step = warp; step < p.steps; step += 2 * kWarps) {
    if (step + kWarps < p.steps) source.load(steps[1], step + kWarps);
    multiply(acc, steps[0]);
    if (step + kWarps < p.steps) {
      if (step + 2 * kWarps < p.steps) source.load(steps[0], step + 2 * kWarps);
      multiply(acc, steps[1]);
    }
  }

#pragma unroll
  for (int i = 0; i < STRIPS; ++i) {
    shares[warp][i][lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kRows * TOKENS; index += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += reinterpret_cast<const float*>(shares[i])[index];
    const int of_lane = index % 4;
    const int row = first_row + index / 128 * 16 + index % 128 / 16 + of_lane / 2 * 8;
    const int column = index / 4 % 4 * 2 + of_lane % 2;
    if (row < p.rows && column < p.tokens) {
      if (!GROUP) sum *= cukit::to_float(scales[row]);
      if (bias) sum += cukit::to_float(bias[row]);
      out[static_cast<long long>(column) * p.rows + row] = cukit::from_float<T>(sum);
    }
  }
}
