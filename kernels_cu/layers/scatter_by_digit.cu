// Second step of a radix sort pass over token ids: scatters every key to its destination.
//
// The destination of a key is the number of keys with a smaller digit, plus those with the same digit
// in earlier chunks, in earlier warps of the block and in earlier rounds and lanes of its warp. The
// sort is therefore stable, and independent of the order in which blocks run.
//
// Mapping: one block per chunk of CHUNK keys; a warp scatters CHUNK / warps consecutive keys, 32 per
//   round.
// Shared memory: 4 * 2^DIGIT_BITS * (THREADS / 32 + 1) + 4 * THREADS / 32 bytes, static.
// Macros: layers/radix.cuh; ID int32|int64|uint32, the type of `keys`; FIRST 0|1: the first pass,
//   where the token of a key is its position. Minimum architecture: sm_80. Deterministic.
// Reference: numpy.argsort(kind="stable").
#include "common/platform.cuh"
#include "common/index.cuh"
#include "layers/radix.cuh"
#include "common/reduce.cuh"

namespace {

using cukit::kBins;
using cukit::kFullMask;
using cukit::kWarpSize;

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kKeysPerWarp = CHUNK / kWarps;
constexpr int kBinsPerThread = kBins / THREADS;
static_assert(CHUNK % THREADS == 0 && kBins % THREADS == 0, "full rounds, equal bins per thread");

// Exclusive prefix sum of values[kBins], in place. All threads must call it.
CUKIT_DEVICE void exclusive_scan(int* values, int* warp_sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  int* own = values + threadIdx.x * kBinsPerThread;
  int sum = 0;
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) sum += own[j];
  int before = cukit::warp_sum_before(sum);
  if (lane == kWarpSize - 1) warp_sums[warp] = before + sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    const int value = own[j];
    own[j] = before;
    before += value;
  }
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) scatter_by_digit(
    const cukit::id_t* __restrict__ keys,  // [num_tokens]
    const int* __restrict__ tokens,        // [num_tokens], unless FIRST
    const int* __restrict__ counts,        // [gridDim.x, kBins]
    unsigned int* __restrict__ keys_out,   // [num_tokens]
    int* __restrict__ tokens_out,          // [num_tokens]
    int num_tokens, int num_keys) {
  __shared__ int places[kWarps][kBins];  // counts per warp; then each warp's next destinations
  __shared__ int starts[kBins];
  __shared__ int warp_sums[kWarps];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int chunk = blockIdx.x;
  const int begin = chunk * CHUNK + warp * kKeysPerWarp;

  for (int bin = threadIdx.x; bin < kBins; bin += THREADS) {
    int total = 0, earlier = 0;
#pragma unroll 8
    for (int c = 0; c < gridDim.x; ++c) {
      const int count = counts[static_cast<long long>(c) * kBins + bin];
      total += count;
      if (c < chunk) earlier += count;
    }
    starts[bin] = total;
    places[0][bin] = earlier;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) places[w][bin] = 0;
  }
  __syncthreads();
  exclusive_scan(starts, warp_sums);

  // Warp w counts into row w + 1, so that prefix sums over the rows are the warps' first destinations.
  if (warp + 1 < kWarps) {
    for (int i = lane; i < kKeysPerWarp; i += kWarpSize) {
      if (begin + i < num_tokens) {
        const unsigned int key = cukit::id_key(keys[begin + i], num_keys);
        atomicAdd(&places[warp + 1][cukit::digit_of(key)], 1);
      }
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += THREADS) {
    int place = starts[bin];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      place += places[w][bin];
      places[w][bin] = place;
    }
  }
  __syncthreads();

  for (int i = lane; i < kKeysPerWarp; i += kWarpSize) {
    const bool present = begin + i < num_tokens;
    const unsigned int key = present ? cukit::id_key(keys[begin + i], num_keys) : 0;
    const int digit = present ? cukit::digit_of(key) : kBins;
    const unsigned int peers = __match_any_sync(kFullMask, digit);
    const int rank = __popc(peers & ((1u << lane) - 1));
    if (present) {
      const int place = places[warp][digit] + rank;
      keys_out[place] = key;
      tokens_out[place] = FIRST ? begin + i : tokens[begin + i];
    }
    __syncwarp(kFullMask);
    if (present && rank == 0) places[warp][digit] += __popc(peers);
    __syncwarp(kFullMask);
  }
}
