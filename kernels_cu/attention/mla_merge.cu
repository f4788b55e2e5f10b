// Merges the pieces of requests that mla_attention_sm90.cu has split.
//
// Mapping: a block processes `rows_per_block` rows of one tile (mla_work.cuh), one after the other;
//   four columns per thread. Requests that were not split are skipped. Programmatic dependent
//   launch: it starts while the attention kernel finishes.
// Macros: DTYPE, TEAM, CAUSAL as in that kernel; THREADS = 128.
// Minimum architecture: sm_90. Deterministic: pieces are added in order.
// Reference: cukit/reference/mla_attention.py.
#include "attention/mla_work.cuh"
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/types.cuh"

namespace {

using namespace cukit::mla;

constexpr int kColumns = kLatent / THREADS;  // per thread
constexpr int kAtOnce = 16;                  // loads in flight

static_assert(kColumns == 4, "one load of 16 bytes");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) mla_merge(
    const float* __restrict__ sums,  // Partial
    T* __restrict__ out,             // [batch, seq_q, heads_q, 512]
    float* __restrict__ lse,         // [batch, heads_q, seq_q] or null
    const int* __restrict__ seq_lens,
    const __grid_constant__ cukit::LatentParameters params,
    int grid,  // blocks of the attention
    int rows_per_block) {
  const int blocks = kRows / rows_per_block;  // per tile
  const int tile = static_cast<int>(blockIdx.x) / blocks % params.problems;
  const int b = static_cast<int>(blockIdx.x) / blocks / params.problems;
  const Partial partial{const_cast<float*>(sums)};
  const Division division(seq_lens, params, grid / TEAM, b);
  const Place::Request_ request(b, seq_lens, params);
  const cukit::PieceSlots slots(division.before + tile / TEAM * request.units, request.units,
                                division.share);
  cukit::wait_for_previous_grids();
  if (slots.count == 1) return;

  const Rows rows(b, tile, params);
  const int first_row = static_cast<int>(blockIdx.x) % blocks * rows_per_block;
  const int column = threadIdx.x * kColumns;
  for (int row = first_row; row < min(rows.count, first_row + rows_per_block); ++row) {
    Statistics all{-cukit::infinity(), 0.0f};
    float total[kColumns] = {};
    for (int first = 0; first < slots.count; first += kAtOnce) {
      float2 own[kAtOnce];
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        own[i] = make_float2(-cukit::infinity(), 0.0f);
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < slots.count) {
          const long long slot = slots.slot(first + i, tile % TEAM);
          own[i] = __ldcg(reinterpret_cast<const float2*>(partial.statistics(slot) + row));
          part[i] =
              __ldcg(reinterpret_cast<const float4*>(partial.out(slot) + row * kLatent + column));
        }
      }
      float top = all.max;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, own[i].x);
      if (top == -cukit::infinity()) continue;
      const float shrink = exp2f(all.max - top);
      all = {top, all.sum * shrink};
#pragma unroll
      for (int j = 0; j < kColumns; ++j) total[j] *= shrink;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = exp2f(own[i].x - top);
        const float each[kColumns] = {part[i].x, part[i].y, part[i].z, part[i].w};
        all.sum = fmaf(own[i].y, weight, all.sum);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) total[j] = fmaf(each[j], weight, total[j]);
      }
    }
    const float by = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
    cukit::Vec<T, kColumns> result;
    const float scaled[kColumns] = {total[0] * by, total[1] * by, total[2] * by, total[3] * by};
    cukit::from_floats(result, scaled);
    cukit::store(out + rows.index(row, params) * kLatent + column, result);
    if (threadIdx.x == 0 && lse != nullptr) lse[rows.statistic(row, params)] = log_sum(all);
  }
}
