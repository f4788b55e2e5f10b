// Splits each row into parts, and selects the k best entries of each part, best first; ties are
// ordered by index, lowest first.
//
// Thread t finds the best of a part's entries t, t + THREADS, ... The k-th best of these maxima is
// a lower bound on the k-th best entry, and only the k threads whose maximum reaches the bound have
// entries that reach it (keys are distinct). These entries, at most k * ceil(entries / THREADS),
// about k for random scores, are collected and sorted.
//
// Mapping: grid (rows, parts): one block per part of a row. Deterministic, because the order of
//   keys is total.
// Shared memory: CAPACITY * 8 bytes, dynamic; CAPACITY a power of two, at least THREADS and
//   k * ceil(ceil(count / parts) / THREADS).
// Macros: FROM_SCORES 0|1: reads scores instead of keys; LAST 0|1: writes scores and indices
//   instead of keys, and requires one part; CAPACITY; THREADS, a power of two, at least k. Minimum
//   architecture: sm_80.
// Reference: cukit/reference/graph_memory.py, retrieve_top_k.
#include "common/platform.cuh"
#include "graph_memory/parameters.cuh"
#include "graph_memory/score_key.cuh"

namespace {

using cukit::Key;

// Bitonic sort, descending, of one key per thread: thread i of the first `size`, a power of two,
// gets the i-th largest. Threads of one warp exchange keys by shuffles, others through `list`
// [THREADS]. All threads must call it.
CUKIT_DEVICE Key sorted(Key own, Key* list, int size) {
  const int thread = threadIdx.x;
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      Key other;
      if (distance < cukit::kWarpSize) {
        other = __shfl_xor_sync(cukit::kFullMask, own, distance);
      } else {
        __syncthreads();
        list[thread] = own;
        __syncthreads();
        other = list[thread ^ distance];
      }
      const bool takes_larger = ((thread & run) == 0) == ((thread & distance) == 0);
      own = takes_larger == (own < other) ? other : own;
    }
  }
  return own;
}

// Bitonic sort of a list, descending; `size` is a power of two. All threads must call it; contains
// barriers.
CUKIT_DEVICE void sort(Key* list, int size) {
  if (size <= THREADS) {
    const int thread = threadIdx.x;
    __syncthreads();
    const Key own = sorted(thread < size ? list[thread] : 0, list, size);
    __syncthreads();
    list[thread] = own;
    __syncthreads();
    return;
  }
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += THREADS) {
        const int low = 2 * i - (i & (distance - 1));
        const Key a = list[low], b = list[low + distance];
        if ((a < b) == ((low & run) == 0)) {
          list[low] = b;
          list[low + distance] = a;
        }
      }
    }
  }
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) select_top(
    const float* __restrict__ scores,  // [rows, count], FROM_SCORES 1
    const Key* __restrict__ keys,      // [rows, count], FROM_SCORES 0; 0: empty entry
    Key* __restrict__ best,            // [rows, parts, k], LAST 0
    float* __restrict__ best_scores,   // [rows, k], LAST 1
    int* __restrict__ best_indices,    // [rows, k], LAST 1
    const __grid_constant__ cukit::SelectParameters p) {
  CUKIT_DYNAMIC_SHARED(Key, list);
  __shared__ int collected;
  const int thread = threadIdx.x;
  const long long row = blockIdx.x;
  const int share = (p.count + p.parts - 1) / p.parts;
  const int begin = min(static_cast<int>(blockIdx.y) * share, p.count);
  const int end = min(begin + share, p.count);
  const auto entry = [&](int i) -> Key {
    if constexpr (FROM_SCORES) {
      return cukit::key_of_score(scores[row * p.count + i], static_cast<unsigned>(i));
    } else {
      return keys[row * p.count + i];
    }
  };

  Key own = 0;
#pragma unroll 8
  for (int i = begin + thread; i < end; i += THREADS) own = max(own, entry(i));
  if (thread == 0) collected = 0;
  const Key place = sorted(own, list, THREADS);
  __syncthreads();
  list[thread] = place;
  __syncthreads();
  const Key bound = list[p.k - 1];
  __syncthreads();
  if (own != 0 && own >= bound) {
#pragma unroll 4
    for (int i = begin + thread; i < end; i += THREADS) {
      const Key key = entry(i);
      if (key != 0 && key >= bound) list[atomicAdd(&collected, 1)] = key;
    }
  }
  __syncthreads();
  const int count = collected;
  int size = 1;
  while (size < count || size < p.k) size *= 2;
  for (int i = count + thread; i < size; i += THREADS) list[i] = 0;
  sort(list, size);
  for (int i = thread; i < p.k; i += THREADS) {
    if constexpr (LAST) {
      best_scores[row * p.k + i] = cukit::score_of_key(list[i]);
      best_indices[row * p.k + i] = static_cast<int>(cukit::index_of_key(list[i]));
    } else {
      best[(row * p.parts + blockIdx.y) * p.k + i] = list[i];
    }
  }
}
