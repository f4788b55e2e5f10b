// Merges the pieces of requests that mla_attention_sm90.cu or mla_attention_float8_sm90.cu split.
//
// Mapping: a tile (mla_work.cuh) has units of 512 outputs, contiguous in a piece's slot; a block
//   merges `units_per_block` of them, one after the other, four outputs per thread. Tiles of
//   requests that were not split are skipped. Programmatic dependent launch: the kernel starts
//   while the attention kernel finishes.
//   A unit is a row or, with FRAGMENT_ROWS, the accumulators of a warp of the attention kernel for
//   eight rows and 64 columns: unit u belongs to warp u / (FRAGMENT_ROWS / 8), in the order [four
//   wgmma tiles][lanes][two columns][two rows]; a block transposes its result in shared memory.
// Macros: DTYPE, TEAM, CAUSAL as in the attention kernel; FRAGMENT_ROWS 0, or HEADS of
//   mla_attention_float8_sm90.cu; THREADS = 128.
// Minimum architecture: sm_90. Deterministic: pieces are added in order.
// Reference: cukit/reference/mla_attention.py.
#include "attention/mla_work.cuh"
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/types.cuh"

namespace {

using namespace cukit::mla;

constexpr int kOutputs = kLatent / THREADS;  // per thread
constexpr int kOwnRows = FRAGMENT_ROWS ? 2 : 1;
constexpr int kUnits = FRAGMENT_ROWS ? FRAGMENT_ROWS : kRows;
constexpr int kFew = 4;                           // AtOnce, for up to kFew pieces and for more
constexpr int kMany = FRAGMENT_ROWS ? 8 : 16;

static_assert(kOutputs == 4, "one load of 16 bytes");

struct Merged {
  Statistics rows[kOwnRows];
  float outputs[kOutputs];  // output i belongs to row i % kOwnRows
};

// Merges this thread's outputs of a unit, which start at `offset` in each slot and belong to the
// kOwnRows rows from `row` on. AtOnce: pieces whose loads are in flight together.
template <int AtOnce>
CUKIT_DEVICE Merged merge(const Partial& partial, const cukit::PieceSlots& slots, int member,
                          int offset, int row) {
  Merged all;
#pragma unroll
  for (Statistics& each : all.rows) each = {-cukit::infinity(), 0.0f};
#pragma unroll
  for (float& each : all.outputs) each = 0.0f;
#pragma unroll 1
  for (int first = 0; first < slots.count; first += AtOnce) {
    float2 own[AtOnce][kOwnRows];
    float4 part[AtOnce];
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
#pragma unroll
      for (float2& each : own[i]) each = make_float2(-cukit::infinity(), 0.0f);
      part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + i < slots.count) {
        const long long slot = slots.slot(first + i, member);
        part[i] = __ldcg(reinterpret_cast<const float4*>(partial.out(slot) + offset));
#pragma unroll
        for (int r = 0; r < kOwnRows; ++r) {
          own[i][r] =
              __ldcg(reinterpret_cast<const float2*>(partial.statistics(slot) + row + r));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      Statistics& total = all.rows[r];
      float top = total.max;
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) top = fmaxf(top, own[i][r].x);
      const float base = top == -cukit::infinity() ? 0.0f : top;
      const float shrink = exp2f(total.max - base);
      total = {top, total.sum * shrink};
#pragma unroll
      for (int j = r; j < kOutputs; j += kOwnRows) all.outputs[j] *= shrink;
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        const float weight = exp2f(own[i][r].x - base);
        const float each[kOutputs] = {part[i].x, part[i].y, part[i].z, part[i].w};
        total.sum = fmaf(own[i][r].y, weight, total.sum);
#pragma unroll
        for (int j = r; j < kOutputs; j += kOwnRows) {
          all.outputs[j] = fmaf(each[j], weight, all.outputs[j]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) {
    const float sum = all.rows[j % kOwnRows].sum;
    all.outputs[j] *= sum == 0.0f ? 0.0f : 1.0f / sum;
  }
  return all;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, FRAGMENT_ROWS ? 5 : 1) mla_merge(
    const float* sums,               // Partial
    T* __restrict__ out,             // [batch, seq_q, heads_q, 512]
    float* __restrict__ lse,         // [batch, heads_q, seq_q] or null
    const int* __restrict__ seq_lens,
    const __grid_constant__ cukit::LatentParameters params,
    int grid,  // number of blocks of the attention kernel
    int units_per_block) {
  const int blocks = kUnits / units_per_block;  // per tile
  const int tile = static_cast<int>(blockIdx.x) / blocks % params.problems;
  const int b = static_cast<int>(blockIdx.x) / blocks / params.problems;
  const Partial partial{const_cast<float*>(sums)};
  const Division division(seq_lens, params, grid / TEAM, b);
  const Place::RequestType request(b, seq_lens, params);
  const cukit::PieceSlots slots(division.before + tile / TEAM * request.units, request.units,
                                division.share);
  cukit::wait_for_previous_grids();
  if (slots.count == 1) return;

  const Rows rows(b, tile, params);
  const int first = static_cast<int>(blockIdx.x) % blocks * units_per_block;
  const int offset = threadIdx.x * kOutputs;
  const auto merge_unit = [&](int unit, int row) {
    const int from = unit * kLatent + offset;
    return slots.count <= kFew ? merge<kFew>(partial, slots, tile % TEAM, from, row)
                               : merge<kMany>(partial, slots, tile % TEAM, from, row);
  };
#if FRAGMENT_ROWS
  constexpr int kWarpColumns = 64;
  alignas(16) __shared__ T block[8][kWarpColumns];
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int own_row = lane % 4 * kOwnRows;
  const int own_column = lane / 4 * 8 + static_cast<int>(threadIdx.x) / cukit::kWarpSize * 2;
#pragma unroll 1
  for (int unit = first; unit < first + units_per_block; ++unit) {
    const int first_row = unit % (FRAGMENT_ROWS / 8) * 8;
    const int first_column = unit / (FRAGMENT_ROWS / 8) * kWarpColumns;
    if (first_row >= rows.count) continue;
    const Merged all = merge_unit(unit, first_row + own_row);
    __syncthreads();  // the previous unit has been stored
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      cukit::Vec<T, 2> pair;
      const float two[2] = {all.outputs[r], all.outputs[kOwnRows + r]};
      cukit::from_floats(pair, two);
      cukit::store(&block[own_row + r][own_column], pair);
      const int row = first_row + own_row + r;
      if (lse != nullptr && first_column == 0 && threadIdx.x < 4 && row < rows.count) {
        lse[rows.statistic(row, params)] = log_sum(all.rows[r]);
      }
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / 8;
    const int column = threadIdx.x % 8 * 8;
    if (row < 8 && first_row + row < rows.count) {
      cukit::Vec<T, 8> eight;
      cukit::load(eight, &block[row][column]);
      cukit::store(out + rows.index(first_row + row, params) * kLatent + first_column + column,
                   eight);
    }
  }
#else
#pragma unroll 1
  for (int row = first; row < min(rows.count, first + units_per_block); ++row) {
    const Merged all = merge_unit(row, row);
    cukit::Vec<T, kOutputs> result;
    cukit::from_floats(result, all.outputs);
    cukit::store(out + rows.index(row, params) * kLatent + offset, result);
    if (threadIdx.x == 0 && lse != nullptr) lse[rows.statistic(row, params)] = log_sum(all.rows[0]);
  }
#endif
}
