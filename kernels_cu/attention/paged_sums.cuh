// Merging the partial results of paged attention: of the warps of a thread block, and of the pieces
// of a problem.
//
// A piece that does not cover its problem stores its partial result to global memory, and the last
// thread block to finish a piece of the problem merges all pieces in order.
//
// Macros: those of paged_attention.cu.
#pragma once

#include "attention/paged_operands.cuh"
#include "attention/paged_rows.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/pack.cuh"

namespace cukit::paged {

// A warp's accumulators and softmax state over its keys of a piece. A lane's rows are 8 n + 2 (lane
// % 4) + i.
struct Sums {
  Outputs out;
  float max[QUERY_TILES][2];
  float sum[QUERY_TILES][2];  // over this lane's keys; sum_over_keys() adds the lanes' sums
  float unit;     // CODE: factor of `out`, at least 1/16 of the largest value scale so far
  float inverse;  // of unit, or 0
  Outputs recent;  // RECENT: outputs of recent keys, in another column order; unit 1

  CUKIT_DEVICE void clear() {
    cukit::clear(out);
    if constexpr (RECENT) cukit::clear(recent);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[n][i] = -infinity();
        sum[n][i] = 0.0f;
      }
    unit = inverse = 0.0f;
  }
};

// Reductions over the lanes that hold the same rows, or over four neighbouring lanes.
CUKIT_DEVICE float max_over_keys(float value) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}
CUKIT_DEVICE float max_over_quad(float value) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}
CUKIT_DEVICE float sum_over_keys(float value) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// Maximum of a row, in log2 units, and its sum of exponentials.
struct Statistics {
  float max, sum;
};

// Returns the factor that turns a row's accumulators into its output and, if `stores`, stores the
// row's log-sum-exp. `number`: index of the row in the problem.
CUKIT_DEVICE float finish_row(const Statistics& row, const Rows& rows, int number,
                              const Arrays& arrays, const PagedParameters& params,
                              bool stores) {
  float sink = -infinity();
  if constexpr (SINKS) sink = arrays.sinks[rows.head(number, params)] * kLog2E;
  const float top = fmaxf(row.max, sink);
  if (top == -infinity()) {
    if (stores && arrays.lse != nullptr) {
      arrays.lse[(static_cast<long long>(rows.batch()) * params.heads_q +
                  rows.head(number, params)) * params.seq_q + rows.token(number, params)] =
          -infinity();
    }
    return 0.0f;
  }
  const float weight = exp2f(row.max - top);
  const float total = fmaf(row.sum, weight, SINKS ? exp2f(sink - top) : 0.0f);
  if (stores && arrays.lse != nullptr) {
    arrays.lse[(static_cast<long long>(rows.batch()) * params.heads_q +
                rows.head(number, params)) * params.seq_q + rows.token(number, params)] =
        (top + log2f(total)) * kLn2;
  }
  return weight / total;
}

// Partial results of pieces. Slot s: kRows * HEAD_DIM floats of outputs, then kRows Statistics.
struct Partial {
  float* memory;

  CUKIT_DEVICE float* out(long long slot) const {
    return memory + slot * (kRows * (HEAD_DIM + 2));
  }
  CUKIT_DEVICE Statistics* statistics(long long slot) const {
    return reinterpret_cast<Statistics*>(out(slot) + kRows * HEAD_DIM);
  }
};

CUKIT_DEVICE float* merge_row(unsigned char* merge, int warp, int row) {
  return reinterpret_cast<float*>(merge + warp * STAGES * kStageBytes) + row * kMergePitch;
}

// Stores two columns of a row of the output.
CUKIT_DEVICE void store_pair(float low, float high, const Rows& rows, int row, int column,
                             const Arrays& arrays, const PagedParameters& params) {
  if (VALUE_PADDED && column >= params.value_dim) return;
  T* to = arrays.out + offset_of(params.out, rows.batch(), rows.token(row, params),
                                        rows.head(row, params)) + column;
  *reinterpret_cast<unsigned*>(to) = pack<T>(low, high);
}

// Merges the warps' results and passes them to store(row, column, sums of this column and the next,
// statistics of the row). `merge`: the stage that each warp read last, into which nothing is copied
// before the next tile.
template <typename Store>
CUKIT_DEVICE void merge_warps(Sums& sums, const Rows& rows, float factor, unsigned char* merge,
                              Statistics (*statistics)[kRows], Store store) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sum_over_keys(sums.sum[n][i]);
      if (lane < 4) statistics[warp][8 * n + 2 * lane + i] = {sums.max[n][i] * factor, sum};
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < QUERY_TILES; ++n) {
    const int first = 8 * n;
    if (first >= rows.count) break;
    float shrink[2];  // factor of this warp's outputs, for this lane's rows
    float weights[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = first + lane % 4 * 2 + i;
      float top = -infinity();
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, statistics[w][number].max);
      const float own = statistics[warp][number].max;
      weights[i] = own == -infinity() ? 0.0f : exp2f(own - top);
      shrink[i] = weights[i] * (CODE ? sums.unit : 1.0f);
    }
    float* own_rows = merge_row(merge, warp, 0);
    store_columns<CacheForm>(own_rows, kMergePitch, sums.out, n, shrink);
    if constexpr (RECENT) {
      __syncwarp();
      store_columns<RecentForm, true>(own_rows, kMergePitch, sums.recent, n, weights);
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < 8 * HEAD_DIM / 2; pair += kThreads) {
      const int row = pair / (HEAD_DIM / 2);
      const int column = pair % (HEAD_DIM / 2) * 2;
      const int number = first + row;
      if (number >= rows.count) break;
      float2 total = make_float2(0.0f, 0.0f);
      Statistics all{-infinity(), 0.0f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) all.max = fmaxf(all.max, statistics[w][number].max);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 part =
            *reinterpret_cast<const float2*>(merge_row(merge, w, row) + column);
        total.x += part.x;
        total.y += part.y;
        const float max = statistics[w][number].max;
        if (max > -infinity()) all.sum += statistics[w][number].sum * exp2f(max - all.max);
      }
      store(number, column, total, all);
    }
    __syncthreads();
  }
}

constexpr int kLoadsInFlight = 16;  // per thread, when pieces are merged

// Merges pieces 0 .. count - 1, piece i in slot slot_of(i), for `Items` groups of four columns of
// the output [rows, HEAD_DIM]: groups index, index + kThreads, ...
template <int Items, typename Slot>
CUKIT_DEVICE void merge_columns(int index, const Rows& rows, int count, Slot slot_of,
                                const Partial& partial, const Arrays& arrays,
                                const PagedParameters& params) {
  constexpr int kAtOnce = kLoadsInFlight / Items;
  Statistics all[Items];
  float total[Items][4] = {};
  int row[Items];
  int column[Items];
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    all[item] = {-infinity(), 0.0f};
    row[item] = (index + item * kThreads) / (HEAD_DIM / 4);
    column[item] = (index + item * kThreads) % (HEAD_DIM / 4) * 4;
  }
  for (int first = 0; first < count; first += kAtOnce) {
    float2 own[Items][kAtOnce];
    float4 part[Items][kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        own[item][i] = make_float2(-infinity(), 0.0f);
        part[item][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < count && row[item] < rows.count) {
          const long long slot = slot_of(first + i);
          own[item][i] =
              __ldcg(reinterpret_cast<const float2*>(partial.statistics(slot) + row[item]));
          part[item][i] = __ldcg(reinterpret_cast<const float4*>(
              partial.out(slot) + row[item] * HEAD_DIM + column[item]));
        }
      }
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      float top = all[item].max;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, own[item][i].x);
      if (top == -infinity()) continue;
      const float shrink = exp2f(all[item].max - top);
      all[item] = {top, all[item].sum * shrink};
#pragma unroll
      for (int j = 0; j < 4; ++j) total[item][j] *= shrink;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = exp2f(own[item][i].x - top);
        all[item].sum = fmaf(own[item][i].y, weight, all[item].sum);
        total[item][0] = fmaf(part[item][i].x, weight, total[item][0]);
        total[item][1] = fmaf(part[item][i].y, weight, total[item][1]);
        total[item][2] = fmaf(part[item][i].z, weight, total[item][2]);
        total[item][3] = fmaf(part[item][i].w, weight, total[item][3]);
      }
    }
  }
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    if (row[item] >= rows.count) break;
    const float by =
        finish_row(all[item], rows, row[item], arrays, params, column[item] == 0);
    const float(&sums)[4] = total[item];
    store_pair(sums[0] * by, sums[1] * by, rows, row[item], column[item], arrays, params);
    store_pair(sums[2] * by, sums[3] * by, rows, row[item], column[item] + 2, arrays, params);
  }
}

// Merges the pieces of a problem, in slots slot_of(0) .. slot_of(count - 1), into its output.
template <typename Slot>
CUKIT_DEVICE void merge_pieces(const Rows& rows, int count, Slot slot_of, const Partial& partial,
                               const Arrays& arrays, const PagedParameters& params) {
  const int items = rows.count * HEAD_DIM / 4;
  int index = threadIdx.x;
  if (count <= kLoadsInFlight / 2) {  // two items at once then take a single round of loads
    for (; index + kThreads < items; index += 2 * kThreads) {
      merge_columns<2>(index, rows, count, slot_of, partial, arrays, params);
    }
  }
  for (; index < items; index += kThreads) {
    merge_columns<1>(index, rows, count, slot_of, partial, arrays, params);
  }
}

// Counts a finished piece. Returns true in the block that finishes the problem, which also resets
// the counter to 0.
CUKIT_DEVICE bool finishes(int* counter, int pieces) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) == pieces - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

#if CLUSTER > 1
// The pieces of a problem that a cluster of blocks merges, in shared memory. Block r merges the
// kOwnColumns columns from r * kOwnColumns on; the other blocks write their sums of these columns
// to the shared memory of block r.
struct ClusterSums {
  static constexpr int kOwnColumns = HEAD_DIM / CLUSTER;
  static_assert(kOwnColumns % 2 == 0, "pairs of columns");

  float out[CLUSTER][kRows][kOwnColumns];
  Statistics statistics[CLUSTER][kRows];

  // Sends the sums of two columns. Every block of the cluster must have started.
  CUKIT_DEVICE void send(int row, int column, float2 sums, const Statistics& own) {
    const int rank = cluster_rank();
    float* to = &out[rank][row][column % kOwnColumns];
    store_remote(to, column / kOwnColumns, sums.x);
    store_remote(to + 1, column / kOwnColumns, sums.y);
    if (column < 2 * CLUSTER) send(row, column / 2, own);
  }
  // Sends the statistics of a block without keys.
  CUKIT_DEVICE void send_nothing() {
    for (int i = threadIdx.x; i < kRows * CLUSTER; i += kThreads) {
      send(i % kRows, i / kRows, {-infinity(), 0.0f});
    }
  }

  // Merges this block's columns. Called after a barrier of the cluster.
  CUKIT_DEVICE void merge(const Rows& rows, const Arrays& arrays, const PagedParameters& params) {
    for (int i = threadIdx.x; i < rows.count * kOwnColumns / 2; i += kThreads) {
      const int row = i / (kOwnColumns / 2);
      const int column = i % (kOwnColumns / 2) * 2;
      Statistics all{-infinity(), 0.0f};
#pragma unroll
      for (int piece = 0; piece < CLUSTER; ++piece) {
        all.max = fmaxf(all.max, statistics[piece][row].max);
      }
      float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int piece = 0; piece < CLUSTER; ++piece) {
        const Statistics own = statistics[piece][row];
        if (own.max == -infinity()) continue;  // no outputs were sent
        const float2 part = *reinterpret_cast<const float2*>(&out[piece][row][column]);
        const float weight = exp2f(own.max - all.max);
        all.sum = fmaf(own.sum, weight, all.sum);
        total.x = fmaf(part.x, weight, total.x);
        total.y = fmaf(part.y, weight, total.y);
      }
      const int first = cluster_rank() * kOwnColumns;
      const float by = finish_row(all, rows, row, arrays, params, first + column == 0);
      store_pair(total.x * by, total.y * by, rows, row, first + column, arrays, params);
    }
  }

 private:
  CUKIT_DEVICE void send(int row, int to, const Statistics& own) {
    Statistics& place = statistics[cluster_rank()][row];
    store_remote(&place.max, to, own.max);
    store_remote(&place.sum, to, own.sum);
  }
};
#endif

}  // namespace cukit::paged
